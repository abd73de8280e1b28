"""A kernel that does nothing, for as long as it is told: what claimed_units.py measures beside. Needs triton."""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit
def hold(ends, nanoseconds):
    """Keep a multiprocessor busy for ``nanoseconds``."""
    start = globaltimer()
    now = start
    while now - start < nanoseconds:
        now = globaltimer()
    tl.store(ends + tl.program_id(0), now)
