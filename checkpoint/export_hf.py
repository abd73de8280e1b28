"""A checkpoint as a Hugging Face folder: python -m checkpoint.export_hf RUN OUT.

The folder is built under another name, reloaded by transformers in a process of its own and compared with our logits,
and gets its name last; a receipt beside the weights says what was checked. What each class can express is in
hf_rules.py, the streaming of weights in hf_weights.py. The way back is import_hf.py.
"""

import argparse
import importlib.metadata
import json
import logging
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from checkpoint.folders import files_below, publish, sha256_of, write_json
from checkpoint.hf_config import generation_config, to_hf_config
from checkpoint.hf_rules import SERVERS, Family, Reader, Verdict, check_rules, default_family, refuse_broken
from checkpoint.hf_weights import WeightsLayout, write_weights
from checkpoint.model_card import model_card
from checkpoint.reference import make_reference
from checkpoint.saved_run import SavedRun, open_saved_run, reading
from checkpoint.verify_hf import REFERENCE
from model.config import ModelConfig

log = logging.getLogger(__name__)

RECEIPT = "gristmill_receipt.json"
UNFINISHED = "UNFINISHED"  # lies in a folder that is being built, and tells our leftovers from other people's folders
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PROJECT_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What an export should be; the defaults are those of the command."""

    dtype_name: str = "float32"
    family: Family | None = None  # None: the one whose QK-norm is the model's
    serve: tuple[Reader, ...] = SERVERS  # servers that must compute the same; a broken rule of theirs is an error
    shard_bytes: int = 4 << 30
    untie_head: bool = False  # write a tied embedding twice, for servers that never tie
    compare_logits: bool = True
    device: str = "cpu"  # of our side of the comparison


def export(run_path: Path | str, out: Path | str, *, step: int | None = None, options: ExportOptions) -> dict[str, Any]:
    """Write a checkpoint of a run to ``out`` as a Hugging Face folder and return its receipt.

    ``step`` chooses the checkpoint; None takes the newest complete one.
    Raises: ValueError when the model, the run or ``out`` does not allow it, or transformers does not agree with us;
    then there is no ``out``, and what was written lies in ``<out>.partial``.
    """
    out = Path(out)
    run = open_saved_run(run_path, step=step)
    config = replace(run.config, vocab_size=run.tokenizer.vocab_size)
    if options.untie_head:
        config = replace(config, tie_embeddings=False)
    family = options.family or default_family(config)
    verdicts = check_rules(config, family)
    unserved = refuse_broken(verdicts, serve=options.serve)
    for verdict in unserved:
        log.warning("%s", verdict)
    partial = _start_folder(out)
    with reading(run):
        _write_files(partial, run, config, family=family, unserved=unserved, options=options)
        report = _compare(partial, run, options) if options.compare_logits else None
    receipt = _receipt(partial, run, family=family, verdicts=verdicts, report=report, options=options)
    write_json(partial / RECEIPT, receipt)
    if report is not None and report["complaints"]:
        raise ValueError(
            f"transformers does not agree with the training code; the export stays in {partial}:\n- "
            + "\n- ".join(report["complaints"])
        )
    (partial / UNFINISHED).unlink()
    publish(partial, out)
    return receipt


def _start_folder(out: Path) -> Path:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder: name another one, or remove it")
    partial = out.with_name(out.name + ".partial")
    if partial.exists():
        if not (partial / UNFINISHED).is_file():
            raise ValueError(f"{partial} is in the way and is not an export that was cut off: remove it")
        log.warning("removing %s, an export that was not finished", partial)
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    (partial / UNFINISHED).write_text("This export was not finished. Remove the folder and export again.\n")
    return partial


def _write_files(
    partial: Path,
    run: SavedRun,
    config: ModelConfig,
    *,
    family: Family,
    unserved: list[Verdict],
    options: ExportOptions,
) -> None:
    dtype = DTYPES[options.dtype_name]
    untie_head = options.untie_head and run.config.tie_embeddings
    layout = WeightsLayout(
        dtype=dtype, vocab_size=config.vocab_size, shard_bytes=options.shard_bytes, untie_head=untie_head
    )
    total_bytes = write_weights(run.checkpoint, run.config, partial, layout)
    log.info("wrote %.2f GiB of weights in %s", total_bytes / 2**30, options.dtype_name)
    values = to_hf_config(
        config,
        family=family,
        dtype=dtype,
        eos_id=run.tokenizer.eos_id,
        load_balance_weight=run.values.get("train", {}).get("load_balance_weight"),
    )
    write_json(partial / "config.json", values)
    write_json(partial / "generation_config.json", generation_config(run.tokenizer.eos_id))
    run.tokenizer.copy_into(partial)
    card = model_card(
        run,
        config,
        family=family,
        dtype_name=options.dtype_name,
        unserved=unserved,
        compared=options.compare_logits,
    )
    (partial / "README.md").write_text(card, encoding="utf-8")


def _compare(partial: Path, run: SavedRun, options: ExportOptions) -> dict[str, Any]:
    # Our model is gone from memory when the other process loads its own.
    make_reference(run, dtype=DTYPES[options.dtype_name], device=torch.device(options.device)).save(partial / REFERENCE)
    report_path = partial / "report.json"
    command = [sys.executable, "-m", "checkpoint.verify_hf", str(partial.resolve()), "--report"]
    finished = subprocess.run(
        [*command, str(report_path.resolve())], cwd=PROJECT_ROOT, capture_output=True, text=True, check=False
    )
    if not report_path.is_file():
        raise ValueError(f"transformers could not load {partial}:\n{finished.stderr.strip()}")
    report: dict[str, Any] = json.loads(report_path.read_text(encoding="utf-8"))
    report_path.unlink()
    return report


def _receipt(
    partial: Path,
    run: SavedRun,
    *,
    family: Family,
    verdicts: list[Verdict],
    report: dict[str, Any] | None,
    options: ExportOptions,
) -> dict[str, Any]:
    written = {name: path for name, path in files_below(partial).items() if name not in (UNFINISHED, RECEIPT)}
    return {
        "format": 1,
        "run": run.path.resolve().name,
        "step": run.state.step,
        "tokens": run.state.tokens,
        "family": family.value,
        "dtype": options.dtype_name,
        "vocabulary": {"trained_rows": run.config.vocab_size, "exported_rows": run.tokenizer.vocab_size},
        "served": ["transformers", *(reader.value for reader in options.serve)],
        # A package's metadata leaves out what torch was built for, as in 2.13.0+cu130.
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__)}
        | {name: importlib.metadata.version(name) for name in ("transformers", "safetensors", "tokenizers")},
        "rules": [verdict.to_json() for verdict in verdicts],
        "reload": report if report is not None else "not compared: --no-compare was given",
        "files": {name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for name, path in written.items()},
    }


def size_in_bytes(text: str) -> int:
    """Return the bytes that ``500MB``, ``2GB`` or a plain number mean (powers of 1000).

    Raises: argparse.ArgumentTypeError for anything else.
    """
    number, factor = text.strip(), 1
    for unit, size in (("KB", 10**3), ("MB", 10**6), ("GB", 10**9)):
        if number.upper().endswith(unit):
            number, factor = number[: -len(unit)], size
    if not number.strip().isdigit() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 500MB or 4GB")
    return int(number) * factor


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m checkpoint.export_hf", description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("out", type=Path, help="folder to write; must not exist, or be empty")
    parser.add_argument("--step", type=int, help="checkpoint to export (default: the newest complete one)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--family", choices=[family.value for family in Family], help="default: from the QK-norm")
    parser.add_argument(
        "--serve",
        nargs="*",
        choices=[reader.value for reader in SERVERS],
        default=[reader.value for reader in SERVERS],
        help="servers that must compute the same as training did (default: all); with none, transformers alone must",
    )
    parser.add_argument("--shard-size", type=size_in_bytes, default=4 << 30, help="like 500MB or 4GB (default: 4 GiB)")
    parser.add_argument("--untie-head", action="store_true", help="write a tied embedding twice, as a head of its own")
    parser.add_argument("--device", default="cpu", help="where our side of the comparison runs (default: cpu)")
    parser.add_argument(
        "--no-compare", action="store_true", help="skip the reload, for a model that does not fit this machine's memory"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Export one checkpoint, print where it is and what was found, and return the exit status."""
    logging.basicConfig(format="%(message)s")
    log.setLevel(logging.INFO)
    parsed = _parse(arguments)
    options = ExportOptions(
        dtype_name=parsed.dtype,
        family=Family(parsed.family) if parsed.family else None,
        serve=tuple(Reader(name) for name in parsed.serve),
        shard_bytes=parsed.shard_size,
        untie_head=parsed.untie_head,
        compare_logits=not parsed.no_compare,
        device=parsed.device,
    )
    try:
        receipt = export(parsed.run, parsed.out, step=parsed.step, options=options)
    except (ValueError, OSError, SafetensorError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"exported step {receipt['step']} of {receipt['run']} to {parsed.out} ({receipt['dtype']})")
    if options.compare_logits:
        reload = receipt["reload"]
        for dtype_name, logits in reload["logits"].items():
            print(
                f"  logits in {dtype_name}: {logits['judged_by']} {logits[logits['judged_by']]:.1e} "
                f"(rounding explains {logits['allowed']:.1e})"
            )
        print(f"  greedy text, transformers {reload['transformers']}: {reload['greedy']['text_transformers']!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
