"""Compiling kernels and keeping them: in memory, and on disk for the next process.

A kernel's key is what fixes its machine code: form, widths, dtype, architecture and tile, and on disk also the
compiler's version and a hash of the kernels' source. Row counts, tokens and experts are run-time values, in no key.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from moe_kernels.cute.tiles import KernelForm, TileConfig

_FUNCTION = "kernel"


@dataclass(frozen=True, kw_only=True)
class KernelKey:
    """What one compiled kernel is for."""

    form: KernelForm
    contraction: int
    columns: int
    dtype: torch.dtype
    arch: str
    tile: TileConfig


def default_cache_folder() -> Path:
    """Return the folder for compiled kernels: ``gristmill/cute`` in the user's cache folder."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "gristmill" / "cute"


class KernelCache:
    """Compiled kernels by key. ``folder`` None keeps them in memory only."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.num_compiled = 0  # compilations since this cache was made: still zero at the second step of a run
        self.num_loaded = 0  # kernels read from the folder instead
        self._kernels: dict[KernelKey, Callable[..., None]] = {}

    def get(self, key: KernelKey) -> Callable[..., None]:
        """Return the kernel of ``key``: from memory, else from the folder, else compiled."""
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = self._kernels[key] = self._load(key) or self._compile(key)
        return kernel

    def _path(self, key: KernelKey) -> Path | None:
        if self.folder is None:
            return None
        digest = hashlib.sha256(repr((asdict(key), compiler_version(), source_hash())).encode()).hexdigest()
        return self.folder / f"{key.form.value}_{key.contraction}x{key.columns}_{key.arch}_{digest[:24]}.o"

    def _load(self, key: KernelKey) -> Callable[..., None] | None:
        path = self._path(key)
        if path is None or not path.exists():
            return None
        from cutlass.cute.runtime import load_module  # noqa: PLC0415 - an optional dependency

        self.num_loaded += 1
        return load_module(str(path), enable_tvm_ffi=True)[_FUNCTION]

    def _build(self, key: KernelKey) -> Any:
        from moe_kernels.cute.build import build_kernel  # noqa: PLC0415 - an optional dependency

        return build_kernel(key)

    def _compile(self, key: KernelKey) -> Callable[..., None]:
        kernel = self._build(key)
        self.num_compiled += 1
        path = self._path(key)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Ranks that compile the same kernel at once each move a whole file into place.
            with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
                kernel.export_to_c(f"{scratch}/kernel.o", function_name=_FUNCTION)
                Path(scratch, "kernel.o").replace(path)
        return kernel


@cache
def compiler_version() -> str:
    """Return the version of nvidia-cutlass-dsl."""
    import cutlass  # noqa: PLC0415 - an optional dependency

    return cutlass.__version__


@cache
def source_hash() -> str:
    """Return a hash over the files that fix machine code; the tile is in the key, and what calls kernels may change."""
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for path in [
        package / "build.py",
        *sorted((package / "common").rglob("*.py")),
        *sorted((package / "sm90").rglob("*.py")),
    ]:
        digest.update(path.read_bytes())
    return digest.hexdigest()
