"""Command line: ``python -m data.inspect ROOT`` shows what a prepared folder holds and which documents feed a step."""

import argparse
import sys
from collections.abc import Sequence
from itertools import accumulate

from tokenizers import Tokenizer

from data.config import DataConfig
from data.errors import DataError
from data.loader import PreparedData, PreparedSource, RowSource, open_prepared
from data.manifest import Manifest, verify_files
from data.packing import documents_of_span, row_span
from data.prepare import summary
from data.shards import Split
from data.tokenizer import load_tokenizer

SNIPPET_TOKENS = 24
SNIPPET_CHARACTERS = 72


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 when everything asked for was printed, 2 when the message says why not."""
    options = build_parser().parse_args(argv)
    try:
        _run(options)
    except (DataError, OSError) as error:
        print(f"data.inspect: {error}", file=sys.stderr)
        return 2
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all options."""
    parser = argparse.ArgumentParser(
        prog="python -m data.inspect", description="Show a folder written by data.prepare."
    )
    parser.add_argument("root", metavar="ROOT", help="the prepared folder, as in data.root")
    defaults = DataConfig(root="unused")
    parser.add_argument("--sequence-length", type=int, default=defaults.sequence_length, help="as data.sequence_length")
    parser.add_argument("--order-seed", type=int, default=defaults.order_seed, help="as data.order_seed")
    parser.add_argument(
        "--mixture", nargs="+", default=[], metavar="NAME=WEIGHT", help="as data.mixture: ROOT holds these folders"
    )
    parser.add_argument("--step", type=int, metavar="N", help="list what optimiser step N reads; the first step is 1")
    parser.add_argument("--sequences-per-step", type=int, metavar="B", help="rows of a step, over all processes")
    parser.add_argument(
        "--sample", type=int, metavar="K", help="print one training row, by its global sample index from 0"
    )
    parser.add_argument("--verify", action="store_true", help="compare every checksum, however large the data")
    return parser


def _run(options: argparse.Namespace) -> None:
    if (options.step is None) != (options.sequences_per_step is None):
        raise DataError("--step and --sequences-per-step belong together: step N reads the N-th so many samples")
    for name, least in (
        ("step", 1),
        ("sequences_per_step", 1),
        ("sample", 0),
        ("sequence_length", 1),
        ("order_seed", 0),
    ):
        value = getattr(options, name)
        if value is not None and value < least:
            raise DataError(f"--{name.replace('_', '-')} {value} must be at least {least}")
    data = open_prepared(
        DataConfig(
            root=options.root,
            sequence_length=options.sequence_length,
            order_seed=options.order_seed,
            mixture=dict(_weight(word) for word in options.mixture),
        )
    )
    tokenizer = load_tokenizer(data.tokenizer_folder)
    for source in data.sources:
        _print_source(source, tokenizer, verify=options.verify)
    S, train, held_out = options.sequence_length, data.train.num_rows, data.held_out.num_rows
    print(f"rows of {S} tokens: {train:,} training, {held_out:,} held out")
    if options.step is not None:
        B = options.sequences_per_step
        print(f"step {options.step} reads samples {(options.step - 1) * B} to {options.step * B - 1}:")
        for sample in range((options.step - 1) * B, options.step * B):
            _print_sample(data, sample, tokenizer)
    if options.sample is not None:
        _print_sample(data, options.sample, tokenizer)
        print(tokenizer.decode(data.train.batch(options.sample, 1).input_ids_BS[0].tolist(), skip_special_tokens=False))


def _weight(word: str) -> tuple[str, float]:
    name, _, weight = word.partition("=")
    try:
        return name, float(weight)
    except ValueError as error:
        raise DataError(f"--mixture {word}: NAME=WEIGHT is needed, such as books=0.3") from error


def _print_source(source: PreparedSource, tokenizer: Tokenizer, *, verify: bool) -> None:
    print(f"{source.folder} (manifest {source.manifest.sha256[:16]})")
    print(summary(source.manifest))
    for record in source.manifest.sources:
        print(f"read from {record.name}: {record.documents:,} documents")
    print(verify_files(source.folder, source.manifest, all_checksums=verify))
    for name, split in (("train", source.train), ("held out", source.held_out)):
        print(f"first document of {name}: {_snippet(split, 0, tokenizer)}")


def _print_sample(data: PreparedData, sample: int, tokenizer: Tokenizer) -> None:
    rows: RowSource = data.train
    located = rows.locate(sample, 1)
    number, epoch, row = int(located.source_N[0]), int(located.epoch_N[0]), int(located.row_N[0])
    source, split = data.sources[number], rows.splits[number]
    start, count = row_span(row, rows.sequence_length)
    print(f"  sample {sample}: {source.name}, epoch {epoch}, row {row}, tokens {start} to {start + count - 1}")
    for document in documents_of_span(start, count, split.document_offsets):
        index = int(split.document_indices[document])
        print(f"    document {_origin(source.manifest, index)}: {_snippet(split, document, tokenizer)}")


def _origin(manifest: Manifest, index: int) -> str:
    """Return a document's place in the text that was prepared: its number within the file it came from."""
    ends = list(accumulate(record.documents for record in manifest.sources))
    number = next(number for number, end in enumerate(ends) if index < end)
    return f"{index - (ends[number] - manifest.sources[number].documents)} of {manifest.sources[number].name}"


def _snippet(split: Split, document: int, tokenizer: Tokenizer) -> str:
    start, end = split.document_offsets[document : document + 2].tolist()
    text = tokenizer.decode(split.tokens.read(start, min(SNIPPET_TOKENS, end - start)).tolist())
    return repr(" ".join(text.split())[:SNIPPET_CHARACTERS])


if __name__ == "__main__":
    sys.exit(main())
