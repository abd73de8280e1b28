"""Processes on machines: what a run will need, whether a machine is ready for it, programs that start the others."""
