"""Compiling kernels and keeping them: in memory, and on disk for the next process.

A kernel's key is what fixes its machine code: form, widths, dtype, architecture and tile, and on disk also the
compiler's version and a hash of the kernels' source. Row counts, tokens and experts are run-time values, in no key.

A layer needs six kernels and the compiler works on one at a time, so the first one that has to be compiled starts
processes for the others. A lock on disk lets each kernel be compiled once by all processes that share the folder.
"""

import fcntl
import hashlib
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from moe_kernels.cute.tiles import KernelForm, TileConfig

log = logging.getLogger(__name__)

_FUNCTION = "kernel"
_WAIT_S = 600.0  # for another process that compiles; a kernel takes seconds


@dataclass(frozen=True, kw_only=True)
class KernelKey:
    """What one compiled kernel is for."""

    form: KernelForm
    contraction: int
    columns: int
    dtype: torch.dtype
    arch: str
    tile: TileConfig


def default_cache_folder() -> Path | None:
    """Return the folder for compiled kernels: ``gristmill/cute`` in the user's cache folder; None if there is none."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(root) if root else Path.home() / ".cache") / "gristmill" / "cute"
    except RuntimeError:  # no HOME, and no such user
        return None


class KernelCache:
    """Compiled kernels by key. ``folder`` None keeps them in memory only."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.num_compiled = 0  # compilations that this cache made or started: not more at the second step of a run
        self.num_loaded = 0  # kernels read from the folder
        self._kernels: dict[KernelKey, Callable[..., None]] = {}

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

        try:
            kernel = load_module(str(path), enable_tvm_ffi=True)[_FUNCTION]
        except RuntimeError as error:
            log.warning("%s cannot be loaded and is compiled again (%s)", path, error)
            return None
        self.num_loaded += 1
        return kernel

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
                try:
                    _write(kernel, path)
                except OSError as error:
                    log.warning("a compiled kernel stays in memory, every process compiles its own (%s)", error)
        return kernel

    def _start_helpers(self, keys: Sequence[KernelKey]) -> None:
        """Start a process for each key that is not on disk and that no process is compiling.

        A helper inherits the lock and holds it until it ends, however it ends; whoever needs its kernel waits for the
        lock and, if there is no kernel then, compiles it and so sees the error.
        """
        for key in keys:
            path = self._path(key)
            if path is None or path.exists():
                continue
            try:
                lock = _take_lock(path)
            except BlockingIOError:
                continue
            if lock is None:
                continue
            with os.fdopen(lock), suppress(OSError):  # where no process can be started, this one compiles
                helper = _start_helper(key, path, lock)
                self.num_compiled += 1
                threading.Thread(target=helper.wait, daemon=True).start()  # a child that nobody waits for is a zombie


def _start_helper(key: KernelKey, path: Path, lock: int) -> subprocess.Popen:
    folders = [str(Path(folder).resolve()) for folder in sys.path if isinstance(folder, str)]
    helper = subprocess.Popen(
        # -P: with -c the current folder would come before PYTHONPATH, and it may hold another moe_kernels.
        [sys.executable, "-P", "-c", "from moe_kernels.cute.compile import help_compile; help_compile()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[lock],
        env={
            "CUTE_DSL_ARCH": key.arch.replace("sm", "sm_") + "a",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(folders),
        },
    )
    assert helper.stdin is not None
    with helper.stdin as pipe:
        pickle.dump((key, path), pipe)
    return helper


def help_compile() -> None:
    """Compile the kernel whose key and path come by standard input: what a helper process does."""
    key, path = pickle.load(sys.stdin.buffer)
    cache = KernelCache(path.parent)
    if cache._path(key) != path:
        sys.exit("the source changed since the process that asks was started: its kernel would be another")
    _write(cache._build(key), path)


def _write(kernel: Any, path: Path) -> None:
    # A whole file is moved into place: others may look for it at any time.
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        kernel.export_to_c(f"{scratch}/kernel.o", function_name=_FUNCTION)
        Path(scratch, "kernel.o").replace(path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of the kernel at ``path``, as soon as it is free. Where there can be no lock, all compile."""
    lock = None
    start = time.monotonic()
    while True:
        try:
            lock = _take_lock(path)
            break
        except BlockingIOError:
            if time.monotonic() - start > _WAIT_S:
                log.warning("%s has been locked for %.0f s by another process: compiled here too", path, _WAIT_S)
                break
            time.sleep(0.02)
    try:
        yield
    finally:
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough where a fork has the file too
            os.close(lock)


def _take_lock(path: Path) -> int | None:
    """Return an open file that holds the lock of the kernel at ``path``; None in a read-only folder and the like.

    Raises: BlockingIOError if another process has it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_suffix(".lock"), os.O_RDONLY | os.O_CREAT, 0o666)  # who may read it may lock it
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return lock


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
