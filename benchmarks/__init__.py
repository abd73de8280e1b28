"""Numbers: what is fast, beside what, on which GPU."""
