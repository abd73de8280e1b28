"""Slow and right: the loop over experts that is ground truth, and the five ops in plain torch."""
