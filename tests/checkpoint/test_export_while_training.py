"""A run saves and prunes checkpoints while one of them is being exported."""

import shutil

import pytest
import torch

from checkpoint import hf_weights
from checkpoint.export_hf import ExportOptions, export
from checkpoint.saved_run import open_saved_run

FILES_ONLY = ExportOptions(compare_logits=False)


def test_a_run_may_go_on_while_a_step_of_it_is_exported(tmp_path, tiny, monkeypatch):
    run = tiny.write_run(tmp_path / "run", tiny.OLMOE, seed=1, step=7)
    expected = tiny.weights_of(run)
    read = hf_weights.read_weights
    reads = []

    def read_while_a_run_saves(folder, names):
        reads.append(names)
        if len(reads) == 3:
            tiny.write_run(run, tiny.OLMOE, seed=2, step=8)
        return read(folder, names)

    monkeypatch.setattr(hf_weights, "read_weights", read_while_a_run_saves)
    assert export(run, tmp_path / "out", options=FILES_ONLY)["step"] == 7
    theirs = tiny.exported_tensors(tmp_path / "out")
    assert torch.equal(theirs["model.norm.weight"], expected["norm.weight"])
    assert not torch.equal(theirs["model.norm.weight"], tiny.weights_of(run)["norm.weight"])
    assert export(run, tmp_path / "newest", options=FILES_ONLY)["step"] == 8


@pytest.mark.parametrize("last_read", [0, 3])
def test_a_checkpoint_that_is_pruned_while_it_is_exported_is_named(tmp_path, tiny, monkeypatch, last_read):
    run = tiny.write_run(tmp_path / "run", tiny.OLMOE)
    checkpoint = open_saved_run(run).checkpoint
    read = hf_weights.read_weights
    reads = []

    def read_while_a_run_prunes(folder, names):
        if len(reads) == last_read:
            shutil.rmtree(checkpoint)
        reads.append(names)
        return read(folder, names)

    monkeypatch.setattr(hf_weights, "read_weights", read_while_a_run_prunes)
    with pytest.raises(
        ValueError, match=r"step_00000007 cannot be read any more: it was removed.*raise checkpoint\.keep"
    ):
        export(run, tmp_path / "out", options=FILES_ONLY)
    assert not (tmp_path / "out").exists()
