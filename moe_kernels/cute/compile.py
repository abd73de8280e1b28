"""Compiling kernels and keeping them: in memory, and on disk for the next process.

A kernel's key is what fixes its machine code: form, widths, dtype, architecture and tile, and on disk also the
compiler's version and a hash of the kernels' source. Row counts, tokens and experts are run-time values, in no key.

A layer needs six kernels and the compiler works on one at a time, so the first one that has to be compiled starts
processes for the others. A lock on disk lets each kernel be compiled once by all processes that share the folder.
"""

import fcntl
import hashlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
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
        self.num_compiled = 0  # compilations that this cache made or started: not more at the second step of a run
        self.num_loaded = 0  # kernels read from the folder
        self._kernels: dict[KernelKey, Callable[..., None]] = {}
        self._helpers: list[subprocess.Popen] = []  # kept to be reaped: a process that ended is no zombie then

    def get(self, key: KernelKey, beside: Sequence[KernelKey] = ()) -> Callable[..., None]:
        """Return the kernel of ``key``: from memory, else from the folder, else compiled.

        If it has to be compiled, other processes compile those of ``beside`` that are missing in the folder meanwhile.
        """
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = self._load(key)
            if kernel is None:
                self._start_helpers(beside)
                kernel = self._compile(key)
            self._kernels[key] = kernel
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
        path = self._path(key)
        if path is None:
            self.num_compiled += 1
            return self._build(key)
        with _locked(path):
            kernel = self._load(key)  # by whoever had the lock
            if kernel is None:
                kernel = self._build(key)
                self.num_compiled += 1
                _write(kernel, path)
        return kernel

    def _start_helpers(self, keys: Sequence[KernelKey]) -> None:
        """Start a process for each key that is not on disk and that no process is compiling.

        A helper inherits the lock and holds it until it ends, however it ends; whoever needs its kernel waits for the
        lock and, if there is no kernel then, compiles it and so sees the error.
        """
        self._helpers = [helper for helper in self._helpers if helper.poll() is None]
        for key in keys:
            path = self._path(key)
            if path is None or path.exists():
                continue
            lock = _try_lock(path)
            if lock is None:
                continue
            with os.fdopen(lock), suppress(OSError):  # where no process can be started, this one compiles
                self._helpers.append(_start_helper(key, path, lock))
                self.num_compiled += 1


def _start_helper(key: KernelKey, path: Path, lock: int) -> subprocess.Popen:
    helper = subprocess.Popen(
        [sys.executable, "-c", "from moe_kernels.cute.compile import help_compile; help_compile()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[lock],
        env={
            "CUTE_DSL_ARCH": key.arch.replace("sm", "sm_") + "a",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(Path(folder).resolve()) for folder in sys.path),
        },
    )
    assert helper.stdin is not None
    with helper.stdin as pipe:
        pickle.dump((key, path), pipe)
    return helper


def help_compile() -> None:
    """Compile the kernel whose key and path come by standard input: what a helper process does."""
    from moe_kernels.cute.build import build_kernel  # noqa: PLC0415 - an optional dependency

    key, path = pickle.load(sys.stdin.buffer)
    _write(build_kernel(key), path)


def _write(kernel: Any, path: Path) -> None:
    # A whole file is moved into place: others may look for it at any time.
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        kernel.export_to_c(f"{scratch}/kernel.o", function_name=_FUNCTION)
        Path(scratch, "kernel.o").replace(path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of the kernel at ``path``, once it is free. Some file systems have none; then all compile."""
    with os.fdopen(_open_lock(path)) as lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _try_lock(path: Path) -> int | None:
    """Return an open file that holds the lock of the kernel at ``path``, or None if that is not to be had now."""
    lock = _open_lock(path)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def _open_lock(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o666)


@cache
def compiler_version() -> str:
    """Return the version of nvidia-cutlass-dsl."""
    return version("nvidia-cutlass-dsl")


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
