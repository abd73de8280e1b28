"""Slow and right: the loop over experts that is ground truth, and the ops in plain torch."""
