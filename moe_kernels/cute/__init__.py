"""The ops as CuTe-DSL kernels. Everything here but ops.py, tiles.py and compile.py imports cutlass."""
