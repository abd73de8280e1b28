"""Kernels of a layer are compiled by several processes at once, each kernel by one of all that share a folder."""

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch

from moe_kernels.cute.compile import KernelCache, KernelKey
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
import json, sys, torch
from pathlib import Path
from moe_kernels.cute.compile import KernelCache, KernelKey
from moe_kernels.cute.tiles import KernelForm, rule_for

def key(form):
    X, Y = form.widths(64, 32)
    return KernelKey(form=form, contraction=X, columns=Y, dtype=torch.bfloat16, arch="sm90", tile=rule_for(form, X, Y))

first, *others = (key(form) for form in (KernelForm.up, *KernelForm.up.followers))
cache = KernelCache(Path(sys.argv[1]))
cache.get(first, others)
started = len(cache._helpers)
for other in others:
    cache.get(other)
print(json.dumps([started, cache.num_compiled, cache.num_loaded]))
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


def test_the_first_kernel_of_a_layer_starts_processes_for_the_others(tmp_path):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl (pip install 'gristmill[cute]')")
    environment = os.environ | {"CUTE_DSL_ARCH": "sm_90a"}

    def run():
        command = [sys.executable, "-c", COMPILES_A_LAYER, str(tmp_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    assert run() == [5, 6, 5], "five processes, six compilations, and all but the first kernel read from their files"
    assert len(list(tmp_path.glob("*.o"))) == 6
    assert run() == [0, 0, 6], "all from disk"


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
    assert cache._helpers == []
    assert built == [OTHER, KEY]


def test_without_a_folder_nothing_is_started(monkeypatch):
    monkeypatch.setattr(KernelCache, "_build", lambda self, key: Kernel())
    cache = KernelCache(None)
    cache.get(KEY, [OTHER])
    assert (cache._helpers, cache.num_compiled) == ([], 1)
