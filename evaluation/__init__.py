"""Judging runs and exports after the fact: samples and summaries. Held-out loss in a run: training/evaluate.py."""
