"""A run's checkpoints: model, optimiser and RNG through torch.distributed.checkpoint, the rest as JSON.

``<folder>/step_00000100/`` holds ``tensors/`` (sharded, readable at any world size), ``train_state.json``,
``config.json`` and ``complete.json``. How a folder becomes complete is in folders.py; the parts of tensors/ that are
read without a model are in tensors.py; Hugging Face's layout is in export_hf.py alone.
"""

import json
import logging
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from checkpoint.folders import publish, why_incomplete, write_json, write_marker
from checkpoint.state import TrainState
from checkpoint.tensors import check_saved, load_tree, save_tree, saved_entries

log = logging.getLogger(__name__)

TENSORS = "tensors"
TRAIN_STATE = "train_state.json"
CONFIG = "config.json"
PARTIAL = ".partial"
REPLACED = ".replaced"
_STEP_FOLDER = re.compile(r"step_(\d{8,})")


def save_checkpoint(
    folder: Path | str,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: TrainState,
    config: dict[str, Any],
    keep: int,
) -> Path:
    """Save a checkpoint of step ``state.step`` in ``folder``, prune older ones, and return the new one's path.

    Every rank calls it. It returns when the checkpoint is on the disk under its final name, so a process killed at any
    moment leaves the previous checkpoint usable. ``config`` holds plain JSON values; ``keep`` counts complete
    checkpoints, the new one included.
    Raises: ValueError for ``keep`` below 1 or an optimiser that has not stepped; TypeError for a config that is not
    JSON; OSError that names the path and the space left when it cannot be written.
    """
    if keep < 1:
        raise ValueError(f"checkpoint.keep={keep} must be at least 1: the checkpoint just written stays")
    if not optimizer.state:
        raise ValueError("the optimiser has no state to save: a checkpoint is taken after at least one step")
    model_state, optimizer_state = get_state_dict(model, optimizer)
    tree = {"model": model_state, "optimizer": optimizer_state, "rng": {str(_rank()): _rng_state()}}
    return _write(Path(folder), tree, state=state, config=config, keep=keep)


def save_weights(folder: Path | str, *, weights: dict[str, Tensor], state: TrainState, config: dict[str, Any]) -> Path:
    """Save a checkpoint without optimiser and RNG, for ``load_weights`` and the export, and return its path.

    ``weights`` are in our names. Raises: TypeError for a config that is not JSON.
    """
    return _write(Path(folder), {"model": weights}, state=state, config=config, keep=None)


def latest_checkpoint(folder: Path | str) -> Path | None:
    """Return the complete checkpoint of the highest step in ``folder``, or None where there is none.

    Checkpoints that were cut off or damaged are passed over, each with a warning that says which and why.
    """
    newest_first = sorted(_step_folders(Path(folder)), key=_step_of, reverse=True)
    for partial in sorted(Path(folder).glob(f"step_*{PARTIAL}")):
        log.warning(
            "checkpoint %s is not used: it was cut off while being written. The next save of its step removes it; "
            "remove it by hand to have its space back, if no process is at work on this run",
            partial,
        )
    for candidate in newest_first:
        reason = why_incomplete(candidate)
        if reason is None:
            return candidate
        log.warning("checkpoint %s is not used: %s", candidate, reason)
    return None


def load_checkpoint(path: Path | str, *, model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainState:
    """Load ``path`` into ``model``, ``optimizer`` and torch's RNG, and return where the run stood.

    Every rank calls it; the world size may differ from the one that saved, but then ranks without a saved RNG state
    keep theirs (a warning says so).
    Raises: ValueError when the checkpoint is damaged or does not hold exactly this model and optimiser; nothing is
    loaded then.
    """
    path = require_complete(path)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    tree: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    saved = saved_entries(path / TENSORS)
    if not any(name.startswith("optimizer.") for name in saved):
        raise ValueError(f"{path} holds weights only, no optimiser: start from it with load_weights, or resume another")
    check_saved(path, tree, saved)
    _check_groups(path, cast("list[dict[str, Any]]", optimizer_state["param_groups"]))
    load_tree(path / TENSORS, tree)
    set_state_dict(model, optimizer, model_state_dict=tree["model"], optim_state_dict=tree["optimizer"])
    _restore_rng(path, saved)
    return read_train_state(path)


def load_weights(path: Path | str, model: nn.Module) -> None:
    """Load the weights and saved buffers of checkpoint ``path`` into ``model``, and nothing else.

    Raises: ValueError when the checkpoint is damaged or does not hold exactly this model's tensors.
    """
    path = require_complete(path)
    tree: dict[str, Any] = {"model": get_model_state_dict(model)}
    check_saved(path, tree, saved_entries(path / TENSORS))
    load_tree(path / TENSORS, tree)
    set_model_state_dict(model, tree["model"])


def read_train_state(path: Path | str) -> TrainState:
    """Return where the run stood when checkpoint ``path`` was saved."""
    return TrainState.from_json(json.loads((Path(path) / TRAIN_STATE).read_text(encoding="utf-8")))


def checkpoint_of_step(folder: Path | str, step: int) -> Path:
    """Return the path that a checkpoint of ``step`` in ``folder`` has, whether it exists or not."""
    return Path(folder) / f"step_{step:08d}"


def require_complete(path: Path | str) -> Path:
    """Return ``path`` if it is a checkpoint that is there whole. Raises: ValueError that says what is wrong."""
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"there is no checkpoint {path}")
    if reason := why_incomplete(path):
        raise ValueError(f"checkpoint {path} is damaged: {reason}")
    return path


def _write(folder: Path, tree: dict[str, Any], *, state: TrainState, config: dict[str, Any], keep: int | None) -> Path:
    final = checkpoint_of_step(folder, state.step)
    partial = final.with_name(final.name + PARTIAL)
    json.dumps(config)  # a config that is not JSON must fail before anything is written
    with _naming_the_disk(partial):
        if _rank() == 0:
            # Other steps' folders stay: another process may be writing one.
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir(parents=True)
        _barrier()
        save_tree(partial / TENSORS, tree)
        _barrier()
        if _rank() == 0:
            check_saved(partial, tree, saved_entries(partial / TENSORS))
            write_json(partial / TRAIN_STATE, state.to_json())
            write_json(partial / CONFIG, config)
            write_marker(partial)
            _replace(partial, final)
    if _rank() == 0 and keep is not None:
        _prune(folder, keep, newest=final)
    _barrier()
    return final


@contextmanager
def _naming_the_disk(partial: Path) -> Iterator[None]:
    # A full disk is a RuntimeError or a CheckpointException where torch writes, and neither names path or disk.
    try:
        yield
    except (OSError, RuntimeError, CheckpointException) as error:
        there = next(folder for folder in (partial, *partial.absolute().parents) if folder.exists())
        reasons = error.failures.values() if isinstance(error, CheckpointException) else ()
        reason = next((str(failure[0]) for failure in reasons), None) or str(error)
        raise OSError(
            f"checkpoint {partial} could not be written, with {shutil.disk_usage(there).free / 2**30:.2f} GiB free "
            f"there: {reason}. Checkpoints that were saved before are whole"
        ) from error


def _replace(partial: Path, final: Path) -> None:
    old = final.with_name(final.name + REPLACED)
    if old.exists():
        shutil.rmtree(old)
    if final.exists():
        # A folder cannot be renamed onto a full one: a run that came back to this step moves the old one aside first.
        log.warning("checkpoint %s is replaced: %s", final, why_incomplete(final) or "the run came to this step again")
        final.rename(old)
    publish(partial, final)
    if old.exists():
        shutil.rmtree(old)


def _prune(folder: Path, keep: int, *, newest: Path) -> None:
    # Folders that are not complete are left where they are: they are evidence, and latest_checkpoint names them.
    others = [path for path in _step_folders(folder) if path != newest and why_incomplete(path) is None]
    for old in sorted(others, key=_step_of, reverse=True)[keep - 1 :]:
        shutil.rmtree(old)


def _step_folders(folder: Path) -> list[Path]:
    return [path for path in folder.glob("step_*") if path.is_dir() and _STEP_FOLDER.fullmatch(path.name)]


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _check_groups(path: Path, groups: list[dict[str, Any]]) -> None:
    # Hyperparameters are the checkpoint's, but which parameters share them must already agree: they are in no tensor.
    saved: dict[str, Any] = {"optimizer": {"param_groups": [{"params": []} for _ in groups]}}
    load_tree(path / TENSORS, saved)
    for index, (group, saved_group) in enumerate(zip(groups, saved["optimizer"]["param_groups"], strict=True)):
        if group["params"] != saved_group["params"]:
            raise ValueError(
                f"{path}: group {index} of the optimiser held the parameters {saved_group['params']}, "
                f"but now holds {group['params']}"
            )


def _rng_state() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_rng(path: Path, saved: Collection[str]) -> None:
    states = _rng_state()
    for device in [device for device in states if f"rng.{_rank()}.{device}" not in saved]:
        log.warning("%s has no %s random state of rank %d: that stream goes on as it is", path, device, _rank())
        del states[device]
    load_tree(path / TENSORS, {"rng": {str(_rank()): states}})
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
