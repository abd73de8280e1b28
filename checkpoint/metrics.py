"""The metrics that a run logged, read back. They are written by training/sinks.py; their names are in
training/metrics.py."""

import json
from pathlib import Path

from checkpoint.folders import in_short


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the lines of a metrics.jsonl without those of steps that were lost when a process ended and done again.

    A last line that was cut off, because a process was killed or is at work, is left out.
    Raises: ValueError that names any other line which is not an object with progress/step; OSError without a file.
    """
    kept: list[dict[str, float]] = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        try:
            values = json.loads(line)
            step = values["progress/step"]
        except (ValueError, LookupError, TypeError) as error:
            if not line.endswith(b"\n"):
                break
            raise ValueError(
                f"{path}, line {number} is not a JSON object with progress/step: {in_short(error)}"
            ) from error
        if "progress/resumed" in values:
            kept = [earlier for earlier in kept if earlier["progress/step"] <= step]
        else:
            kept.append(values)
    return kept
