"""A new run that starts from weights that are there already: an import (import_hf.py) or another run's checkpoint.

Going on with the same run is store.load_checkpoint; here optimiser, order of the data and counts start anew.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from checkpoint.reference import TEXT
from checkpoint.saved_run import SavedTokenizer, open_saved_run, open_tokenizer
from checkpoint.store import load_weights
from model.config import ModelConfig

# Fields that change no number that the weights were trained to give under top-K routing.
_FREE_FIELDS = ("model.init_std", "model.max_positions", "model.moe.routing.")


def load_start(
    source: Path | str, *, model: nn.Module, config: ModelConfig, tokenizer: Path | str, step: int | None = None
) -> Path:
    """Load the weights of the run or import in folder ``source`` into ``model`` and return the checkpoint's path.

    Every rank calls it; ``model`` may be sharded. ``config`` is what ``model`` was built from, ``tokenizer`` the folder
    of the tokenizer that the data was prepared with, ``step`` the checkpoint (None: the newest complete one).
    Raises: ValueError, with ``model`` as it was, when ``source`` is of another function than ``config`` describes, its
    tokenizer gives other ids, or it has no complete checkpoint.
    """
    start = open_saved_run(source, step=step)
    known, wanted = _leaves(asdict(start.config)), _leaves(asdict(config))
    differences = [
        f"- {name}={_plain(wanted[name])}, but {_plain(known[name])} there"
        for name in wanted
        if not name.startswith(_FREE_FIELDS) and wanted[name] != known[name]
    ]
    if differences:
        raise ValueError(f"the weights in {source} are not those of this run's model:\n" + "\n".join(differences))
    _check_tokenizer(Path(source), start.tokenizer, open_tokenizer(Path(tokenizer)))
    load_weights(start.checkpoint, model)
    return start.checkpoint


def _check_tokenizer(source: Path, known: SavedTokenizer, wanted: SavedTokenizer) -> None:
    for what, same in (
        ("another vocabulary", known.vocabulary() == wanted.vocabulary()),
        ("other ids for the same text", known.encode(TEXT) == wanted.encode(TEXT)),
    ):
        if not same:
            raise ValueError(
                f"the tokenizer in {wanted.folder} has {what} than that of the weights in {source}: prepare the data "
                f"with the tokenizer in {known.folder}"
            )


def _leaves(values: dict[str, Any], prefix: str = "model") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        leaves |= _leaves(value, f"{prefix}.{key}") if isinstance(value, dict) else {f"{prefix}.{key}": value}
    return leaves


def _plain(value: Any) -> Any:
    return getattr(value, "name", value)
