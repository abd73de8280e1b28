"""What is routed: pure functions from router probabilities to a plan. How a plan is computed: layer_op.py."""
