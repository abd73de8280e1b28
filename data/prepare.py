"""Command line: ``python -m data.prepare`` writes the folder that ``data.root`` names.

Without options it prepares the bundled text. Options become PrepareSettings here; the work is data/pipeline.py's.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from data.errors import DataError
from data.manifest import DEFAULT_ROOT, Manifest
from data.pipeline import PrepareSettings, prepare
from data.progress import Progress
from data.sources import NamedDataset, Source, check_file
from data.tokenizer import MIN_VOCAB_SIZE

BUNDLED_TEXT = Path(__file__).parent / "text" / "state_of_the_union.jsonl.gz"
DEFAULT_VOCAB_SIZE = 4096
DEFAULT_SHARD_TOKENS = 2**27  # files of 256 or 512 MiB
DEFAULT_TOKENIZER_TEXT_MB = 1000


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 when the folder is there as asked for, else 2 (130 for Ctrl-C) behind a message."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    start_s = time.monotonic()
    try:
        settings = settings_from_arguments(arguments)
        manifest, written = prepare(settings, Progress())
    except (DataError, OSError) as error:
        print(f"data.prepare: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("data.prepare: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    if not written:
        print(f"{settings.out} is already prepared with these settings")
    print(summary(manifest))
    if written:
        print(f"written to {settings.out} in {time.monotonic() - start_s:.1f} s")
    return 0


def summary(manifest: Manifest) -> str:
    """Return, in a few lines, what a prepared folder holds."""
    lines = []
    for name, split in (("train", manifest.train), ("held out", manifest.held_out)):
        bytes_per_token = split.text_bytes / split.tokens
        counts = f"{split.documents:>11,} documents {split.tokens:>15,} tokens"
        lines.append(f"{name:<9}{counts} {bytes_per_token:6.3f} bytes/token")
    lines.append(
        f"vocabulary {manifest.vocab_size:,}; token frequencies alone reach {manifest.unigram_ce_train_fit:.4f} nats "
        f"per held-out token (fitted to the held-out tokens themselves: {manifest.unigram_entropy_held_out:.4f})"
    )
    if manifest.documents_skipped_empty:
        lines.append(f"{manifest.documents_skipped_empty:,} empty documents left out")
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all options; their help is their documentation."""
    parser = argparse.ArgumentParser(
        prog="python -m data.prepare",
        allow_abbrev=False,  # the manifest keeps the command, from which --out is taken by its name
        description="Turn text into token shards, a tokenizer folder and a manifest. Without options: the bundled text "
        f"into {DEFAULT_ROOT}. A run that was stopped goes on where it was; a finished folder is left as it is.",
    )
    text = parser.add_argument_group("text")
    text.add_argument(
        "--text", nargs="+", type=Path, metavar="FILE", default=[],
        help=".jsonl, .json, .parquet (a document a row), .txt (a document a file); all but .parquet also as .gz",
    )  # fmt: skip
    text.add_argument(
        "--text-field", default="text", metavar="NAME", help="field with a document's text (default: text)"
    )
    text.add_argument("--skip-empty", action="store_true", help="leave empty documents out instead of stopping at one")
    text.add_argument(
        "--dataset", metavar="NAME", help="a dataset of the Hugging Face hub, or a folder laid out like one"
    )
    text.add_argument("--dataset-config", metavar="NAME", help="its configuration, where it has several")
    text.add_argument("--dataset-split", default="train", metavar="NAME", help="its split to read (default: train)")
    text.add_argument(
        "--dataset-revision", metavar="HASH", help="the commit to read, for a preparation to be repeatable"
    )
    text.add_argument("--download", action="store_true", help="download the dataset first instead of streaming it")
    tokens = parser.add_argument_group("tokens")
    tokens.add_argument(
        "--vocab-size", type=int, metavar="V",
        help=f"of the byte-level BPE tokenizer to train on the training split (default: {DEFAULT_VOCAB_SIZE})",
    )  # fmt: skip
    tokens.add_argument(
        "--tokenizer-text-mb", type=int, default=DEFAULT_TOKENIZER_TEXT_MB, metavar="MB",
        help=f"train the tokenizer on this much text at most, from the start (default: {DEFAULT_TOKENIZER_TEXT_MB})",
    )  # fmt: skip
    tokens.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="Hugging Face tokenizer folder or tokenizer.json to take instead"
    )
    tokens.add_argument("--eos-token", metavar="TOKEN", help="its token that ends documents, if its folder doesn't say")
    output = parser.add_argument_group("output")
    output.add_argument("--out", type=Path, metavar="FOLDER", help=f"where to write (bundled text: {DEFAULT_ROOT})")
    output.add_argument(
        "--held-out-fraction",
        type=float,
        default=0.05,
        metavar="F",
        help="share of the documents held out (default: 0.05)",
    )
    output.add_argument("--seed", type=int, default=0, help="of the choice of held-out documents (default: 0)")
    output.add_argument(
        "--shard-tokens", type=int, default=DEFAULT_SHARD_TOKENS, metavar="N",
        help=f"begin another file after this many tokens (default: {DEFAULT_SHARD_TOKENS})",
    )  # fmt: skip
    return parser


def settings_from_arguments(arguments: Sequence[str]) -> PrepareSettings:
    """Return the settings that command-line arguments ask for.

    Raises:
        DataError: naming the option that can't be followed.
    """
    options = build_parser().parse_args(arguments)
    sources = _sources(options)
    if not 0 < options.held_out_fraction <= 0.5:
        raise DataError(f"--held-out-fraction {options.held_out_fraction} must be above 0 and at most 0.5")
    if not 0 <= options.seed < 2**63:
        raise DataError(f"--seed {options.seed} must lie between 0 and 2**63 - 1")
    for name, value in (("--shard-tokens", options.shard_tokens), ("--tokenizer-text-mb", options.tokenizer_text_mb)):
        if value < 1:
            raise DataError(f"{name} {value} must be at least 1")
    if options.tokenizer is not None and options.vocab_size is not None:
        raise DataError("--vocab-size is for a tokenizer to be trained; with --tokenizer the size is given")
    if options.tokenizer is None and options.eos_token is not None:
        raise DataError("--eos-token is for a tokenizer given with --tokenizer")
    vocab_size = None
    if options.tokenizer is None:
        vocab_size = DEFAULT_VOCAB_SIZE if options.vocab_size is None else options.vocab_size
        if vocab_size < MIN_VOCAB_SIZE:
            raise DataError(
                f"--vocab-size {vocab_size} must be at least {MIN_VOCAB_SIZE}: 256 bytes and the end of a text"
            )
    return PrepareSettings(
        out=options.out if options.out is not None else Path(DEFAULT_ROOT),
        sources=sources,
        text_field=options.text_field,
        vocab_size=vocab_size,
        tokenizer=options.tokenizer,
        eos_token=options.eos_token,
        tokenizer_text_mb=options.tokenizer_text_mb,
        held_out_fraction=options.held_out_fraction,
        seed=options.seed,
        skip_empty=options.skip_empty,
        shard_tokens=options.shard_tokens,
        command=_command_without_out(arguments),
    )


def _sources(options: argparse.Namespace) -> tuple[Source, ...]:
    if options.dataset is not None and options.text:
        raise DataError(
            "--text and --dataset exclude each other: prepare each into its own folder and mix them in training"
        )
    if options.dataset is None and not options.text:
        return (check_file(BUNDLED_TEXT),)
    if options.out is None:
        raise DataError(f"--out is needed with --text and --dataset: {DEFAULT_ROOT} is for the bundled text")
    if options.dataset is not None:
        return (
            NamedDataset(
                path=options.dataset,
                config=options.dataset_config,
                split=options.dataset_split,
                revision=options.dataset_revision,
                streaming=not options.download,
            ),
        )
    return tuple(check_file(path) for path in options.text)


def _command_without_out(arguments: Sequence[str]) -> str:
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "--out":
            next(words)
        elif not word.startswith("--out="):
            kept.append(word)
    return shlex.join(["python", "-m", "data.prepare", *kept])


if __name__ == "__main__":
    sys.exit(main())
