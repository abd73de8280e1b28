"""Whether a tensor's kernels may be Triton's: asked before a module is imported that needs the package."""

from importlib.util import find_spec

from torch import Tensor

_HAS_TRITON = find_spec("triton") is not None  # CUDA builds of torch bring it


def runs_triton(tensor: Tensor) -> bool:
    """Return whether Triton's kernels can run on ``tensor`` here."""
    return tensor.is_cuda and _HAS_TRITON
