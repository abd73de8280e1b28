"""Processes on machines: programs that start train.py and the other commands. Nothing here computes."""
