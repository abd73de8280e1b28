"""A prepared folder → batches by sample index; there is no other state.

``batch(first_sample, num_sequences)`` gives the same rows whatever was asked before, so a run that has consumed n
samples goes on from sample n, on any number of processes. The order is data/order.py's, the cut into rows
data/packing.py's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from data.batch import Batch
from data.config import DataConfig
from data.errors import DataError
from data.manifest import (
    MANIFEST_NAME,
    SPLITS,
    TOKENIZER_FOLDER,
    Manifest,
    prepare_command,
    read_manifest,
    verify_files,
)
from data.mixture import build_interleave
from data.order import Located, Order, PlainOrder, ShuffledOrder
from data.packing import count_rows, document_numbers, row_span
from data.shards import Split

MAX_BATCH_TOKENS = 2**31
MAX_SAMPLE = 2**62


class RowSource:
    """Rows of one split of one or several prepared folders, in a fixed order without end.

    Sample ``num_rows`` is the first of the second epoch, for held-out rows too.
    """

    def __init__(self, splits: Sequence[Split], order: Order, *, sequence_length: int) -> None:
        self.splits = tuple(splits)
        self.sequence_length = sequence_length
        self._order = order

    @property
    def num_rows(self) -> int:
        """Return the number of rows of one epoch, all sources together."""
        return self._order.num_rows

    def batch(self, first_sample: int, num_sequences: int) -> Batch:
        """Return the rows of ``num_sequences`` samples from the global index ``first_sample`` on.

        Raises:
            TypeError: for an index or a number that isn't an int.
            ValueError: for a negative index, no sequences, or more than memory holds.
        """
        located = self.locate(first_sample, num_sequences)
        B, S = num_sequences, self.sequence_length
        tokens_BS1 = np.empty((B, S + 1), np.int64)
        document_BS = np.empty((B, S), np.int32)
        for place, (source, row) in enumerate(zip(located.source_N.tolist(), located.row_N.tolist(), strict=True)):
            split = self.splits[source]
            start, count = row_span(row, S)
            tokens_BS1[place] = split.tokens.read(start, count)
            document_BS[place] = document_numbers(start, S, split.document_offsets)
        tokens = torch.from_numpy(tokens_BS1)
        return Batch(
            input_ids_BS=tokens[:, :-1].contiguous(),
            labels_BS=tokens[:, 1:].contiguous(),
            document_BS=torch.from_numpy(document_BS),
        )

    def locate(self, first_sample: int, num_sequences: int) -> Located:
        """Return source, epoch and row of each of these samples; raises as ``batch`` does."""
        for name, value in (("first_sample", first_sample), ("num_sequences", num_sequences)):
            if type(value) is not int:
                raise TypeError(f"{name} must be an int, it is {value!r}")
        if not 0 <= first_sample < MAX_SAMPLE:
            raise ValueError(f"first_sample={first_sample} must lie between 0 and 2**62 - 1")
        if not 1 <= num_sequences <= MAX_BATCH_TOKENS // self.sequence_length:
            raise ValueError(
                f"num_sequences={num_sequences} rows of data.sequence_length={self.sequence_length} tokens: "
                f"at least 1 row and at most {MAX_BATCH_TOKENS} tokens make a batch"
            )
        return self._order.locate(np.arange(first_sample, first_sample + num_sequences, dtype=np.int64))


@dataclass(frozen=True)
class PreparedSource:
    """One prepared folder, opened."""

    name: str
    folder: Path
    manifest: Manifest
    train: Split
    held_out: Split


@dataclass(frozen=True)
class PreparedData:
    """What a run reads: training rows in their order, held-out rows in the order of the text."""

    sources: tuple[PreparedSource, ...]
    train: RowSource
    held_out: RowSource  # of all sources, one after the other
    held_out_by_source: dict[str, RowSource]

    @property
    def manifest(self) -> Manifest:
        """Return the manifest of the first source; vocabulary and tokenizer are the same in all of them."""
        return self.sources[0].manifest

    @property
    def tokenizer_folder(self) -> Path:
        """Return the Hugging Face tokenizer folder that the tokens were made with."""
        return self.sources[0].folder / TOKENIZER_FOLDER

    @property
    def unigram_ce_train_fit(self) -> float:
        """Return nats per held-out token under each source's own training frequencies, over all sources."""
        held_out_tokens = [source.manifest.held_out.tokens for source in self.sources]
        losses = [source.manifest.unigram_ce_train_fit for source in self.sources]
        return sum(n * loss for n, loss in zip(held_out_tokens, losses, strict=True)) / sum(held_out_tokens)

    @property
    def held_out_bytes_per_token(self) -> float:
        """Return UTF-8 bytes per held-out token over all sources; bits per byte = nats per token / ln 2 / this."""
        splits = [source.manifest.held_out for source in self.sources]
        return sum(split.text_bytes for split in splits) / sum(split.tokens for split in splits)


def open_prepared(config: DataConfig) -> PreparedData:
    """Return the data that the configuration names, after comparing every file with its manifest.

    Raises:
        DataError (a ValueError): when data is missing, damaged, made with another tokenizer, or shorter than a row; the
            message names the knob and the command that mends it.
    """
    root = Path(config.root)
    folders = {name: root / name for name in config.mixture} if config.mixture else {root.name: root}
    sources = tuple(_open_source(name, folder, in_mixture=bool(config.mixture)) for name, folder in folders.items())
    _check_same_tokenizer(sources)
    splits = {"train": [source.train for source in sources], "held_out": [source.held_out for source in sources]}
    rows = {split: tuple(_count_rows(source, split, config.sequence_length) for source in sources) for split in splits}
    interleave = build_interleave(list(config.mixture.values()) or [1.0])
    train_order = ShuffledOrder(rows["train"], config.order_seed, interleave)
    S = config.sequence_length
    return PreparedData(
        sources=sources,
        train=RowSource(splits["train"], train_order, sequence_length=S),
        held_out=RowSource(splits["held_out"], PlainOrder(rows["held_out"]), sequence_length=S),
        held_out_by_source={
            source.name: RowSource([source.held_out], PlainOrder((num_rows,)), sequence_length=S)
            for source, num_rows in zip(sources, rows["held_out"], strict=True)
        },
    )


def _how_to_mend(folder: Path) -> str:
    # Only what data.prepare wrote may be advised away: the folder that was named by mistake may hold runs.
    if not folder.exists():
        return f"To mend it, run: {prepare_command(folder, None)}"
    if not folder.is_dir():
        return "Name a folder that data.prepare wrote"
    if {path.name for path in folder.iterdir()} <= {MANIFEST_NAME, TOKENIZER_FOLDER, *SPLITS}:
        return f"To mend it, remove {folder}, then run: {prepare_command(folder, None)}"
    inside = sorted(path.parent.as_posix() for path in folder.glob(f"*/{MANIFEST_NAME}"))
    return (
        f"What it holds is something else: name a folder that data.prepare wrote, such as {', '.join(inside)}"
        if inside
        else "What it holds is something else: name a folder that data.prepare wrote"
    )


def _open_source(name: str, folder: Path, *, in_mixture: bool) -> PreparedSource:
    knob = f"data.mixture.{name} in data.root={folder.parent}" if in_mixture else f"data.root={folder}"
    try:
        manifest = read_manifest(folder)
    except DataError as error:
        raise DataError(f"{knob}: {error}. {_how_to_mend(folder)}") from error
    try:
        verify_files(folder, manifest)
    except DataError as error:
        raise DataError(f"{knob}: {error}. To mend it, run: {prepare_command(folder, manifest)}") from error
    return PreparedSource(
        name=name,
        folder=folder,
        manifest=manifest,
        train=Split(folder, manifest.train, manifest.token_dtype),
        held_out=Split(folder, manifest.held_out, manifest.token_dtype),
    )


def _check_same_tokenizer(sources: Sequence[PreparedSource]) -> None:
    first = sources[0]
    for other in sources[1:]:
        if other.manifest.tokenizer_sha256 != first.manifest.tokenizer_sha256:
            raise DataError(
                f"data.mixture: {first.folder} and {other.folder} were made with different tokenizers. Prepare the "
                f"second again, in another folder, with --tokenizer {first.folder / TOKENIZER_FOLDER}"
            )


def _count_rows(source: PreparedSource, split: str, sequence_length: int) -> int:
    num_tokens = (source.train if split == "train" else source.held_out).tokens.num_tokens
    num_rows = count_rows(num_tokens, sequence_length)
    if num_rows == 0:
        raise DataError(
            f"data.sequence_length={sequence_length} needs {sequence_length + 1} tokens, the {split} split of "
            f"{source.folder} has {num_tokens}: use shorter rows or more text"
        )
    return num_rows
