"""Checkpoints: bitwise resumption, refusal of what does not fit, and folders that were cut off or damaged."""

import json
import logging
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from checkpoint.state import TrainState
from checkpoint.store import (
    latest_checkpoint,
    load_checkpoint,
    load_weights,
    read_train_state,
    save_checkpoint,
    save_weights,
)
from checkpoint.tensors import read_weights, saved_weights

CONFIG = {"model": {"width": 8}, "run": {"name": "toy"}}


class Toy(nn.Module):
    """Two layers, dropout (so that torch's RNG matters), a buffer, and a parameter group without decay."""

    def __init__(self, seed: int, width: int = 8) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Linear(4, width)
        self.second = nn.Linear(width, 3)
        self.register_buffer("bias_E", torch.zeros(3))
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)

    def forward(self, x_TD: Tensor) -> Tensor:
        self.bias_E += 1
        return self.second(nn.functional.dropout(self.first(x_TD).relu(), 0.5))


def toy_optimizer(model: Toy) -> torch.optim.AdamW:
    norms = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    matrices = [parameter for name, parameter in model.named_parameters() if not name.endswith("bias")]
    return torch.optim.AdamW([{"params": matrices}, {"params": norms, "weight_decay": 0.0}], lr=0.05)


def train(model: Toy, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x_TD = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
        loss = (model(x_TD) - x_TD[:, :3]).square().mean() + 0.1 * torch.randn(())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def state_at(step: int) -> TrainState:
    return TrainState(step=step, tokens=16 * step, samples=step, wandb_id="abc123")


def save(folder: Path, model: Toy, optimizer: torch.optim.Optimizer, step: int, keep: int = 2) -> Path:
    return save_checkpoint(folder, model=model, optimizer=optimizer, state=state_at(step), config=CONFIG, keep=keep)


def trained(steps: int, width: int = 8) -> tuple[Toy, torch.optim.AdamW]:
    model = Toy(seed=0, width=width)
    optimizer = toy_optimizer(model)
    torch.manual_seed(0)
    train(model, optimizer, range(steps))
    return model, optimizer


def test_resuming_equals_not_stopping_bit_for_bit(tmp_path):
    whole, whole_optimizer = trained(4)
    path = save(tmp_path, whole, whole_optimizer, 4)
    train(whole, whole_optimizer, range(4, 9))
    after_whole = torch.rand(3)

    torch.manual_seed(99)
    resumed = Toy(seed=1)
    resumed_optimizer = toy_optimizer(resumed)
    for group in resumed_optimizer.param_groups:
        group["lr"] = 123.0
    assert load_checkpoint(path, model=resumed, optimizer=resumed_optimizer) == state_at(4)
    train(resumed, resumed_optimizer, range(4, 9))

    assert torch.equal(torch.rand(3), after_whole)
    for (name, one), other in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    one_state, other_state = whole_optimizer.state_dict(), resumed_optimizer.state_dict()
    assert one_state["param_groups"] == other_state["param_groups"]
    for index, moments in one_state["state"].items():
        assert all(torch.equal(moments[key], other_state["state"][index][key]) for key in moments), index


def test_saving_changes_nothing_in_the_run(tmp_path):
    saved, saved_optimizer = trained(3)
    save(tmp_path, saved, saved_optimizer, 3)
    train(saved, saved_optimizer, range(3, 6))
    unsaved, _ = trained(6)
    for (name, one), other in zip(saved.state_dict().items(), unsaved.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


def test_a_checkpoint_holds_state_config_and_shapes_beside_the_tensors(tmp_path):
    path = save(tmp_path, *trained(2), 2)
    assert path == tmp_path / "step_00000002"
    assert read_train_state(path) == state_at(2)
    assert json.loads((path / "config.json").read_text()) == CONFIG
    entries = saved_weights(path / "tensors")
    assert entries["first.weight"] == ((8, 4), torch.float32)
    assert set(entries) == {"first.weight", "first.bias", "second.weight", "second.bias", "bias_E"}


def test_single_tensors_are_read_without_the_model(tmp_path):
    model, optimizer = trained(2)
    path = save(tmp_path, model, optimizer, 2)
    weights = read_weights(path / "tensors", ["second.bias", "bias_E"])
    assert set(weights) == {"second.bias", "bias_E"}
    assert torch.equal(weights["second.bias"], model.second.bias)
    assert torch.equal(weights["bias_E"], model.bias_E)


def test_weights_load_without_an_optimizer(tmp_path):
    model, optimizer = trained(2)
    path = save(tmp_path, model, optimizer, 2)
    fresh = Toy(seed=7)
    load_weights(path, fresh)
    for (name, one), other in zip(model.state_dict().items(), fresh.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


def test_weights_alone_do_not_resume(tmp_path):
    model, _ = trained(1)
    path = save_weights(tmp_path, weights=model.state_dict(), state=state_at(0), config=CONFIG)
    load_weights(path, Toy(seed=3))
    fresh = Toy(seed=4)
    with pytest.raises(ValueError, match=r"weights only.*load_weights"):
        load_checkpoint(path, model=fresh, optimizer=toy_optimizer(fresh))


def test_only_the_newest_are_kept(tmp_path):
    model, optimizer = trained(1)
    for step in (1, 2, 3, 4):
        save(tmp_path, model, optimizer, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000003", "step_00000004"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step_00000004"


def test_pruning_never_takes_the_checkpoint_just_written_or_a_damaged_one(tmp_path):
    model, optimizer = trained(1)
    for step in (5, 8):
        save(tmp_path, model, optimizer, step)
    (tmp_path / "step_00000005" / "train_state.json").unlink()
    save(tmp_path, model, optimizer, 2, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002", "step_00000005"]


def test_saving_a_step_again_replaces_it(tmp_path, caplog):
    model, optimizer = trained(1)
    save(tmp_path, model, optimizer, 1)
    train(model, optimizer, range(1, 2))
    path = save(tmp_path, model, optimizer, 1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_00000001"]
    assert torch.equal(read_weights(path / "tensors", ["first.bias"])["first.bias"], model.first.bias)
    assert "is replaced" in caplog.text


def damage(path: Path, how: str) -> None:
    shard = next((path / "tensors").glob("*.distcp"))
    if how == "shortened":
        os.truncate(shard, shard.stat().st_size - 1)
    elif how == "missing":
        shard.unlink()
    elif how == "altered":
        state = json.loads((path / "train_state.json").read_text())
        (path / "train_state.json").write_text(json.dumps(state | {"tokens": 33}, indent=2) + "\n")
    elif how == "unmarked":
        (path / "complete.json").unlink()
    elif how == "half a marker":
        os.truncate(path / "complete.json", 20)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("shortened", r"__0_0.distcp has \d+ bytes, but had \d+"),
        ("missing", "__0_0.distcp is missing"),
        ("altered", "train_state.json .*SHA-256"),
        ("unmarked", "no complete.json"),
        ("half a marker", "complete.json cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path, caplog, how, reason):
    model, optimizer = trained(1)
    older = save(tmp_path, model, optimizer, 1)
    newer = save(tmp_path, model, optimizer, 2)
    damage(newer, how)
    assert latest_checkpoint(tmp_path) == older
    (message,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert str(newer) in message
    with pytest.raises(ValueError, match=reason):
        load_checkpoint(newer, model=model, optimizer=optimizer)
    with pytest.raises(ValueError, match=reason):
        load_weights(newer, model)


def test_a_folder_without_checkpoints_has_no_latest(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "absent") is None


KILLED_WHILE_SAVING = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path[:0] = [sys.argv[1], sys.argv[2]]
import test_store
from checkpoint import folders, store

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

model, optimizer = test_store.trained(1)
folder = Path(sys.argv[3])
test_store.save(folder, model, optimizer, 1, keep=1)
where = sys.argv[4]
if where == "tensors half written":
    write = torch.distributed.checkpoint.filesystem._write_item
    written = []
    def one_then_die(*args, **kwargs):
        written.append(0)
        return die() if len(written) == 5 else write(*args, **kwargs)
    torch.distributed.checkpoint.filesystem._write_item = one_then_die
elif where == "before the train state":
    store.write_json = die
elif where == "before the marker":
    folders.write_json = die
elif where == "before the rename":
    Path.rename = die
elif where == "before pruning":
    store._prune = die
test_store.save(folder, model, optimizer, 2, keep=1)
"""


@pytest.mark.parametrize(
    ("where", "usable"),
    [
        ("tensors half written", 1),
        ("before the train state", 1),
        ("before the marker", 1),
        ("before the rename", 1),
        ("before pruning", 2),
    ],
)
def test_a_process_killed_while_saving_leaves_a_usable_checkpoint(tmp_path, caplog, where, usable):
    here = Path(__file__).resolve()
    command = [sys.executable, "-c", KILLED_WHILE_SAVING, str(here.parents[2]), str(here.parent), str(tmp_path), where]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == -signal.SIGKILL, finished.stderr
    latest = latest_checkpoint(tmp_path)
    assert latest == tmp_path / f"step_{usable:08d}"
    assert ("cut off while being written" in caplog.text) == (usable == 1)

    model = Toy(seed=5)
    optimizer = toy_optimizer(model)
    assert load_checkpoint(latest, model=model, optimizer=optimizer).step == usable
    save(tmp_path, model, optimizer, 2, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]


def test_the_folder_that_another_process_is_writing_stays(tmp_path, caplog):
    other = tmp_path / "step_00000009.partial"
    other.mkdir()
    (other / "being written").touch()
    mine = tmp_path / "step_00000001.partial"
    mine.mkdir()
    (mine / "cut off").touch()
    path = save(tmp_path, *trained(1), 1)
    assert (other / "being written").exists()
    assert not mine.exists()
    assert not (path / "cut off").exists()
    assert latest_checkpoint(tmp_path) == path
    assert f"{other} is not used" in caplog.text


@pytest.fixture
def no_room():
    """Gives a function after which no file can grow past a number of bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda num_bytes: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("num_bytes", [0, 100, 1000, 3000])
def test_a_disk_without_room_is_named_and_leaves_the_checkpoint_before(tmp_path, no_room, num_bytes):
    model, optimizer = trained(1)
    before = save(tmp_path, model, optimizer, 1)
    no_room(num_bytes)
    with pytest.raises(
        OSError, match=r"step_00000002\.partial could not be written, with \d+\.\d\d GiB free"
    ) as raised:
        save(tmp_path, model, optimizer, 2)
    assert raised.value.__cause__ is not None
    assert "\n" not in str(raised.value), "a trace of torch is the cause, not the message"
    assert latest_checkpoint(tmp_path) == before
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    assert latest_checkpoint(tmp_path) != save(tmp_path, model, optimizer, 2)


def test_another_shape_is_refused_by_name(tmp_path):
    path = save(tmp_path, *trained(1), 1)
    wider = Toy(seed=0, width=9)
    with pytest.raises(ValueError, match=r"model\.first\.weight \(saved \(8, 4\) float32, needed \(9, 4\) float32\)"):
        load_checkpoint(path, model=wider, optimizer=toy_optimizer(wider))
    with pytest.raises(ValueError, match=r"model\.first\.weight \(saved \(8, 4\)"):
        load_weights(path, wider)


def test_another_dtype_is_refused_by_name(tmp_path):
    path = save(tmp_path, *trained(1), 1)
    with pytest.raises(ValueError, match=r"model\.first\.weight \(saved \(8, 4\) float32, needed \(8, 4\) bfloat16\)"):
        load_weights(path, Toy(seed=0).bfloat16())


def test_missing_and_unexpected_tensors_are_refused_by_name(tmp_path):
    path = save(tmp_path, *trained(1), 1)
    larger = Toy(seed=0)
    larger.third = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"missing in the checkpoint: model\.third\.weight, model\.third\.bias"):
        load_weights(path, larger)
    smaller = Toy(seed=0)
    del smaller.bias_E
    with pytest.raises(ValueError, match=r"unknown to this run: model\.bias_E"):
        load_weights(path, smaller)


def test_other_parameter_groups_are_refused_before_anything_is_loaded(tmp_path):
    path = save(tmp_path, *trained(1), 1)
    model = Toy(seed=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    swapped = torch.optim.AdamW([{"params": model.first.parameters()}, {"params": model.second.parameters()}], lr=0.05)
    with pytest.raises(ValueError, match=r"group 0 of the optimiser held .*second\.weight"):
        load_checkpoint(path, model=model, optimizer=swapped)
    with pytest.raises(ValueError, match=r"unknown to this run: optimizer\.param_groups\.1"):
        load_checkpoint(path, model=model, optimizer=torch.optim.AdamW(model.parameters()))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_what_cannot_be_saved_is_refused_before_a_folder_exists(tmp_path):
    model, optimizer = trained(1)
    with pytest.raises(ValueError, match=r"checkpoint\.keep=0"):
        save(tmp_path / "runs", model, optimizer, 1, keep=0)
    with pytest.raises(ValueError, match="no state to save"):
        save(tmp_path / "runs", model, toy_optimizer(model), 1)
    with pytest.raises(TypeError, match="JSON"):
        save_checkpoint(
            tmp_path / "runs", model=model, optimizer=optimizer, state=state_at(1), config={"x": Path()}, keep=1
        )
    assert not (tmp_path / "runs").exists()


def test_a_train_state_with_other_fields_is_refused():
    values = state_at(3).to_json()
    assert TrainState.from_json(values) == state_at(3)
    with pytest.raises(ValueError, match="fields"):
        TrainState.from_json(values | {"epoch": 1})
    with pytest.raises(ValueError, match=r"tokens=1\.5"):
        TrainState.from_json(values | {"tokens": 1.5})
    with pytest.raises(ValueError, match="wandb_id=3"):
        TrainState.from_json(values | {"wandb_id": 3})
    with pytest.raises(ValueError, match="top_k_counts"):
        TrainState.from_json(values | {"top_k_counts": [[1, 0.5]]})


def test_expert_counts_come_back_from_a_checkpoint(tmp_path):
    model, optimizer = trained(1)
    state = TrainState(step=1, tokens=16, samples=1, wandb_id=None, top_k_counts=[[3, 0, 5], [4, 4, 0]])
    path = save_checkpoint(tmp_path, model=model, optimizer=optimizer, state=state, config=CONFIG, keep=1)
    assert load_checkpoint(path, model=model, optimizer=optimizer) == state
