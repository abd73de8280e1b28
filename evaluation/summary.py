"""One screen about a run: ``python -m evaluation.summary RUN``. Reads the run folder; loads no model."""

import argparse
import json
import sys
from pathlib import Path
from shlex import join
from typing import Any

from checkpoint.folders import in_short
from checkpoint.metrics import read_metrics


def logged(run: Path) -> list[dict[str, float]]:
    """Return what the run in ``run`` logged, at least a line. Raises: ValueError if it has not logged anything yet."""
    path = run / "metrics.jsonl"
    if not path.exists():
        raise ValueError(f"{path} does not exist: {run} is not the folder of a run that has logged anything")
    lines = read_metrics(path)
    if not lines:
        raise ValueError(f"{path} is empty: the run has not logged a step yet")
    return lines


def last_line(lines: list[dict[str, float]], key: str) -> dict[str, float] | None:
    """Return the latest line that has ``key``, or None if it was never logged."""
    return next((line for line in reversed(lines) if key in line), None)


def summary(run: Path) -> list[tuple[str, str]]:
    """Return the (label, value) rows of the summary of the run in ``run``. Raises: ValueError for a damaged one."""
    lines = logged(run)
    rows = [
        ("run folder", str(run)),
        ("steps, tokens", f"{lines[-1]['progress/step']:.0f} steps, {lines[-1]['progress/tokens']:,.0f} tokens"),
    ]
    for label, key, form in (
        ("training loss, last step", "loss/ce", "{:.3f} nats/token"),
        ("held-out loss, top-K", "eval/held_out/ce_top_k", "{:.3f} nats/token"),
        ("held-out loss, training routing", "eval/held_out/ce_train_routing", "{:.3f} nats/token"),
        ("routing gap", "eval/held_out/routing_gap", "{:+.4f} nats/token (training routing minus top-K)"),
    ):
        line = last_line(lines, key)
        if line is not None:
            step, last_step = line["progress/step"], lines[-1]["progress/step"]
            rows.append((label, form.format(line[key]) + ("" if step == last_step else f" (at step {step:.0f})")))
    rows.append(("unigram cross-entropy, held-out", f"{unigram_ce(run):.3f} nats/token"))
    throughput = [line["throughput/tokens_per_day"] for line in lines if "throughput/tokens_per_day" in line]
    if throughput:
        rows.append(("throughput, median", f"{sorted(throughput)[len(throughput) // 2] / 1e9:.3f} B tokens/day"))
    checkpoints = sorted(path.name for path in (run / "checkpoints").glob("step_*") if path.suffix != ".partial")
    rows.append(("checkpoints", ", ".join(checkpoints) or "none"))
    rows += _wandb_rows(run)
    return rows + _export_rows(run)


def unigram_ce(run: Path) -> float:
    """Return what token frequencies alone reach on the held-out text of ``run``, in nats per token.

    Of the two figures in the manifests (frequencies of the training text, and the held-out text's own) it takes the
    lower one, which is the harder to beat; several sources are weighed by their held-out tokens.
    Raises: ValueError if the run's data.json is missing or damaged.
    """
    path = run / "data.json"
    try:
        manifests: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        tokens = [manifest["held_out"]["tokens"] for manifest in manifests]
        figures = [min(m["unigram_ce_train_fit"], m["unigram_entropy_held_out"]) for m in manifests]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{path}, which holds the manifests of the run's data, cannot be read: {in_short(error)}"
        ) from error
    return float(sum(n * figure for n, figure in zip(tokens, figures, strict=True)) / sum(tokens))


def _wandb_rows(run: Path) -> list[tuple[str, str]]:
    folders = sorted((run / "wandb").glob("*run-*-*"))
    if not folders:
        return []
    rows = [("wandb", str(folders[-1]))]
    offline = [folder for folder in folders if folder.name.startswith("offline-run-")]
    if offline:
        rows.append(("upload it", f"wandb sync {join(map(str, offline))}"))
    return rows


def _export_rows(run: Path) -> list[tuple[str, str]]:
    rows = []
    for path in sorted(run.glob("*/gristmill_receipt.json")):
        if path.parent.suffix == ".partial":  # transformers did not agree with it, or it was cut off
            continue
        receipt = json.loads(path.read_text(encoding="utf-8"))
        rows.append(("export", f"{path.parent}: {receipt['family']}, step {receipt['step']}, {receipt['dtype']}"))
        if isinstance(receipt["reload"], str):
            rows.append(("reloaded", receipt["reload"]))
            continue
        for dtype_name, logits in receipt["reload"]["logits"].items():
            measure = logits["judged_by"]
            rows.append(
                (
                    "reloaded by transformers",
                    f"logits in {dtype_name}: {measure} {logits[measure]:.1e} (rounding: {logits['allowed']:.1e})",
                )
            )
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Print the summary; with ``--require-margin``, leave with an error if the held-out loss misses it."""
    parser = argparse.ArgumentParser(prog="python -m evaluation.summary", description=__doc__)
    parser.add_argument("run", type=Path, help="the folder of a run, for example runs/tiny")
    parser.add_argument(
        "--require-margin", type=float, metavar="NATS", help="fail unless held-out loss is this far below unigram"
    )
    options = parser.parse_args(arguments)
    try:
        rows = summary(options.run)
    except ValueError as problem:
        sys.exit(f"error: {problem}")
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        print(f"{label:<{width}}  {value}")
    if options.require_margin is not None:
        _require_margin(options.run, options.require_margin)


def _require_margin(run: Path, required: float) -> None:
    line = last_line(logged(run), "eval/held_out/ce_top_k")
    if line is None:
        sys.exit("error: the run was never evaluated, so its held-out loss is not known")
    margin = unigram_ce(run) - line["eval/held_out/ce_top_k"]
    print(f"\nheld-out loss is {margin:.3f} nats/token below unigram cross-entropy; {required:.3f} required")
    if not margin >= required:
        sys.exit("error: the held-out loss misses the required margin")


if __name__ == "__main__":
    main()
