"""The ``tensors/`` folder of a checkpoint: written, compared and read through torch.distributed.checkpoint.

Names are paths with dots: ``model.<parameter>``, ``optimizer.state.<parameter>.exp_avg``, ``rng.<rank>.cpu``.
Single tensors can be read without building a model. What a checkpoint means is in store.py.
"""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save


class Entry(NamedTuple):
    """What is known of one saved value without reading it; plain objects have neither shape nor dtype."""

    shape: tuple[int, ...] | None
    dtype: torch.dtype | None

    def __str__(self) -> str:
        return "no tensor" if self.shape is None else f"{self.shape} {str(self.dtype).removeprefix('torch.')}"


def save_tree(folder: Path, tree: dict[str, Any]) -> None:
    """Write the tensors and plain objects of a nested dictionary; every rank writes its shards."""
    with _quiet_alone():
        save(tree, storage_writer=FileSystemWriter(folder, sync_files=True), no_dist=not dist.is_initialized())


def load_tree(folder: Path, tree: dict[str, Any]) -> None:
    """Fill the tensors of a nested dictionary in place, and replace its plain objects, from ``folder``."""
    with _quiet_alone():
        load(tree, storage_reader=FileSystemReader(folder), no_dist=not dist.is_initialized())


def saved_entries(folder: Path) -> dict[str, Entry]:
    """Return the shape and dtype of every value saved in ``folder``, by its name; shapes are those of whole tensors."""
    metadata = FileSystemReader(folder).read_metadata()
    return {
        name: Entry(tuple(saved.size), saved.properties.dtype)
        if isinstance(saved, TensorStorageMetadata)
        else Entry(None, None)
        for name, saved in metadata.state_dict_metadata.items()
    }


def saved_weights(folder: Path) -> dict[str, Entry]:
    """Return the shape and dtype of every saved tensor of the model, by the model's own name for it."""
    return {
        name.removeprefix("model."): entry for name, entry in saved_entries(folder).items() if name.startswith("model.")
    }


def read_weights(folder: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Read the model's tensors ``names`` whole, on the CPU, in the dtype that they were saved in.

    Raises: KeyError for a name that was not saved.
    """
    entries = saved_weights(folder)
    weights = {}
    for name in names:
        entry = entries[name]
        assert entry.shape is not None
        weights[name] = torch.empty(entry.shape, dtype=entry.dtype)
    with _quiet_alone():
        load({"model": weights}, storage_reader=FileSystemReader(folder), no_dist=True)
    return weights


def check_saved(path: Path, tree: dict[str, Any], saved: dict[str, Entry]) -> None:
    """Raise unless checkpoint ``path`` holds exactly the values of ``tree``, section by section, in shape and dtype.

    Sections (``model``, ``optimizer``) that ``tree`` does not have are not looked at, and neither is the RNG.
    Raises: ValueError that names every missing, unexpected and differing value, to a readable number.
    """
    wanted = {name: _entry_of(value) for name, value in _leaves(tree) if not name.startswith("rng.")}
    sections = tuple(f"{section}." for section in tree if section != "rng")
    found = {name: entry for name, entry in saved.items() if name.startswith(sections)}
    complaints = [
        *_complain("missing in the checkpoint", [name for name in wanted if name not in found]),
        *_complain("in the checkpoint, but unknown to this run", [name for name in found if name not in wanted]),
        *_complain(
            "saved with another shape or dtype",
            [
                f"{name} (saved {found[name]}, needed {entry})"
                for name, entry in wanted.items()
                if name in found and found[name] != entry
            ],
        ),
    ]
    if complaints:
        raise ValueError(f"{path} does not fit this model and optimiser: " + "; ".join(complaints))


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    # The names are those that torch.distributed.checkpoint gives: a list is opened only if it holds dictionaries.
    if isinstance(tree, dict):
        items = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list) and any(isinstance(value, dict) for value in tree):
        items = [(str(index), value) for index, value in enumerate(tree)]
    else:
        yield prefix, tree
        return
    for key, value in items:
        yield from _leaves(value, f"{prefix}.{key}" if prefix else key)


def _entry_of(value: Any) -> Entry:
    return Entry(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else Entry(None, None)


def _complain(what: str, names: list[str], limit: int = 5) -> list[str]:
    if not names:
        return []
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return [f"{what}: {', '.join(names[:limit])}{rest}"]


@contextmanager
def _quiet_alone() -> Iterator[None]:
    # Without a process group torch warns at every call that it assumes one process, which is what we ask for.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
