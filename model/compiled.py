"""Functions that are compiled wherever they run on a GPU, whatever becomes of the module that calls them."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` compiled as a whole, once in a process; importing the compiler is left to the first call."""
    return torch.compile(function, fullgraph=True)
