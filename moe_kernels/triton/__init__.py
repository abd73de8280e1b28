"""Kernels in Triton that the GPU backends share."""
