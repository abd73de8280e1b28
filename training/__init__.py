"""One optimiser step, repeated and measured: the step, the loop, the metrics. Shapes and maths are in model/."""
