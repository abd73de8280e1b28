"""The function from token ids to logits and losses, on one device.

Meshes, sharding, activation checkpointing and compilation are applied from outside (training/parallel.py); how the
experts are computed, and which tokens they get, is moe_kernels/.
"""
