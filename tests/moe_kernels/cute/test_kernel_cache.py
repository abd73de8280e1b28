"""Compiled kernels: what they are kept by, in memory and on disk, and how several processes share compiling them."""

import fcntl
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import moe_kernels
from moe_kernels.cute import compile as compile_module
from moe_kernels.cute.compile import KernelCache, KernelKey, source_hash
from moe_kernels.cute.tiles import KernelForm, rule_for

KEY = KernelKey(
    form=KernelForm.up,
    contraction=64,
    columns=32,
    dtype=torch.bfloat16,
    arch="sm90",
    tile=rule_for(KernelForm.up, 64, 32),
)
OTHER = replace(KEY, columns=40)

COMPILES_A_LAYER = """
import json, os, sys, time, torch
from pathlib import Path
from moe_kernels.cute.compile import KernelCache, KernelKey, source_hash
from moe_kernels.cute.tiles import KernelForm, rule_for

def key(form):
    X, Y = form.widths(64, 32)
    return KernelKey(form=form, contraction=X, columns=Y, dtype=torch.bfloat16, arch="sm90", tile=rule_for(form, X, Y))

def is_zombie_child(path):
    try:
        state, parent = path.read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return False
    return state == "Z" and int(parent) == os.getpid()

first, *others = (key(form) for form in (KernelForm.up, *KernelForm.up.followers))
cache = KernelCache(Path(sys.argv[1]))
cache.get(first, others)
for other in others:
    cache.get(other)
time.sleep(1.0)
zombies = [path for path in Path("/proc").glob("[0-9]*/stat") if is_zombie_child(path)]
print(json.dumps([cache.num_compiled, cache.num_loaded, len(zombies)]))
"""


class Kernel:
    """Stands for a compiled kernel."""

    def export_to_c(self, path, function_name):
        assert function_name == "kernel"
        open(path, "w").close()  # noqa: PTH123 - stands for the compiler's own writing


@pytest.fixture
def built(monkeypatch):
    """Return the keys that this process compiled; compiling and loading make stand-ins."""
    keys = []
    monkeypatch.setattr(KernelCache, "_build", lambda self, key: keys.append(key) or Kernel())

    def load(self, key):
        path = self._path(key)
        if not path.exists():
            return None
        self.num_loaded += 1
        return Kernel()

    monkeypatch.setattr(KernelCache, "_load", load)
    monkeypatch.setattr("moe_kernels.cute.compile.compiler_version", lambda: "0")
    return keys


def test_kernels_are_kept_apart_by_all_that_fixes_their_code_and_by_nothing_else(built, tmp_path):
    keys = [KEY, replace(KEY, contraction=72), replace(KEY, dtype=torch.float16), OTHER]
    cache = KernelCache(tmp_path)
    kernels = [cache.get(k) for k in keys]
    assert len({id(kernel) for kernel in kernels}) == len(keys)
    assert cache.get(replace(KEY)) is kernels[0]
    assert built == keys
    assert cache.num_compiled == len(keys)
    assert len(list(tmp_path.glob("*.o"))) == len(keys)


@pytest.mark.parametrize(("file", "changes"), [("sm90/epilogue.py", True), ("build.py", True), ("ops.py", False)])
def test_the_disk_key_follows_the_files_that_fix_machine_code(monkeypatch, tmp_path, file, changes):
    shutil.copytree(Path(compile_module.__file__).parent, tmp_path / "cute")
    monkeypatch.setattr(compile_module, "__file__", str(tmp_path / "cute" / "compile.py"))
    before = source_hash.__wrapped__()
    (tmp_path / "cute" / file).write_text("# changed", encoding="utf-8")
    assert (source_hash.__wrapped__() != before) == changes


def test_the_first_kernel_of_a_layer_starts_processes_for_the_others(tmp_path):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl (pip install 'gristmill[cute]')")
    root = str(Path(moe_kernels.__file__).parents[1])
    environment = os.environ | {"CUTE_DSL_ARCH": "sm_90a", "PYTHONPATH": root}
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "moe_kernels").mkdir(parents=True)
    (elsewhere / "moe_kernels" / "__init__.py").write_text("raise SystemExit(3)", encoding="utf-8")

    def run():
        command = [sys.executable, "-P", "-c", COMPILES_A_LAYER, str(tmp_path)]
        # Started in a folder with another moe_kernels, which is not the one that the process uses.
        done = subprocess.run(command, env=environment, cwd=elsewhere, capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    assert run() == [6, 5, 0], "six compilations, and all kernels but the first read from their files"
    assert len(list(tmp_path.glob("*.o"))) == 6
    assert run() == [0, 6, 0], "all from disk"


def test_who_finds_a_kernel_being_compiled_waits_for_it(built, tmp_path):
    cache = KernelCache(tmp_path)
    path = cache._path(KEY)
    held = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT)  # by what stands for another process
    fcntl.flock(held, fcntl.LOCK_EX)

    def finish():
        time.sleep(0.2)
        path.touch()
        os.close(held)

    other = threading.Thread(target=finish)
    other.start()
    cache.get(KEY)
    other.join()
    assert (built, cache.num_compiled, cache.num_loaded) == ([], 0, 1)


@pytest.mark.parametrize("interpreter", ["/bin/false", "/no/such/file"])
def test_a_process_that_fails_leaves_its_kernel_to_who_needs_it(built, monkeypatch, tmp_path, interpreter):
    monkeypatch.setattr(sys, "executable", interpreter)
    cache = KernelCache(tmp_path)
    cache.get(KEY, [OTHER])
    cache.get(OTHER)
    assert built == [KEY, OTHER]


def test_nothing_is_started_for_kernels_that_exist_or_that_somebody_compiles(built, tmp_path):
    cache = KernelCache(tmp_path)
    being_compiled = replace(KEY, columns=48)
    cache.get(OTHER)
    with cache._path(being_compiled).with_suffix(".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        cache.get(KEY, [OTHER, being_compiled])
    assert built == [OTHER, KEY]
    assert cache.num_compiled == 2, "no process was started"


def test_without_a_folder_nothing_is_started(monkeypatch):
    monkeypatch.setattr(KernelCache, "_build", lambda self, key: Kernel())
    cache = KernelCache(None)
    cache.get(KEY, [OTHER])
    assert cache.num_compiled == 1


def test_a_lock_that_is_never_given_back_is_not_waited_for_for_ever(built, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(compile_module, "_WAIT_S", 0.1)
    cache = KernelCache(tmp_path)
    path = cache._path(KEY)
    with path.with_suffix(".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        cache.get(KEY)
    assert built == [KEY]
    assert "has been locked" in caplog.text
    assert path.exists()


def test_a_folder_that_cannot_be_written_keeps_no_process_from_its_kernel(built, tmp_path, caplog):
    (tmp_path / "file").touch()
    cache = KernelCache(tmp_path / "file" / "folder")
    cache.get(KEY, [OTHER])
    assert built == [KEY]
    assert "stays in memory" in caplog.text


def test_a_file_that_cannot_be_loaded_is_replaced(tmp_path, monkeypatch, caplog):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl (pip install 'gristmill[cute]')")
    monkeypatch.setattr(KernelCache, "_build", lambda self, key: Kernel())
    cache = KernelCache(tmp_path)
    path = cache._path(KEY)
    path.write_bytes(b"no object file")
    assert isinstance(cache.get(KEY), Kernel)
    assert "cannot be loaded" in caplog.text
    assert path.read_bytes() == b""


def test_a_helper_that_finds_other_source_compiles_nothing(tmp_path, monkeypatch):
    path = KernelCache(tmp_path)._path(KEY)
    monkeypatch.setattr(compile_module, "source_hash", lambda: "changed")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(pickle.dumps((KEY, path)))))
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl (pip install 'gristmill[cute]')")
    with pytest.raises(SystemExit, match="source changed"):
        compile_module.help_compile()
    assert not path.exists()


def test_without_a_home_kernels_stay_in_memory(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert compile_module.default_cache_folder() is None
