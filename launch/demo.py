"""Rehearses the whole life of a run with the commands that a user would type: ``python -m launch.demo``.

Prepare data, train half-way, stop, resume, evaluate, export to Hugging Face, reload, sample, summarise. Every command
is printed before it runs; nothing is computed here.
"""

import shlex
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

PROMPT = "The American people"
HALF_WAY = 350  # of the 700 steps in configs/train.yaml
MARGIN_NATS = 1.0  # what training must win over unigram statistics


def main() -> None:
    """Run the commands one after the other and stop at the first that fails."""
    name = f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    run, export = Path("runs") / name, Path("runs") / name / "export"
    train = ["train.py", f"run.name={name}"]
    start = time.perf_counter()
    for title, command in (
        ("Prepare the bundled text", ["-m", "data.prepare"]),
        ("Train, and stop half-way", [*train, f"run.stop_at_step={HALF_WAY}"]),
        ("Resume to the end, and evaluate", train),
        (
            "Export to Hugging Face, and reload the export in a fresh process",
            ["-m", "checkpoint.export_hf", str(run), str(export)],
        ),
        ("Sample from the export with transformers", ["-m", "evaluation.sample", str(export), "--prompt", PROMPT]),
        ("Summary", ["-m", "evaluation.summary", str(run), "--require-margin", str(MARGIN_NATS)]),
    ):
        _run(title, command)
    print(f"\nThe demo took {time.perf_counter() - start:.0f} s.")


def _run(title: str, arguments: list[str]) -> None:
    print(f"\n== {title}\n$ python {shlex.join(arguments)}", flush=True)
    start = time.perf_counter()
    with subprocess.Popen([sys.executable, *arguments]) as process:
        try:
            returncode = process.wait()
        except KeyboardInterrupt:
            # The command got Ctrl-C too, and training saves before it leaves.
            process.wait()
            sys.exit(f"\nthe demo was stopped; that command goes on with: python {shlex.join(arguments)}")
    if returncode != 0:
        sys.exit(f"the demo stopped: that command left with exit code {returncode}")
    print(f"   ({time.perf_counter() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
