import json
from pathlib import Path

from checkpoint.metrics import read_metrics


def line(step: int, **metrics: float) -> str:
    return json.dumps({"progress/step": step, **metrics}) + "\n"


def test_steps_repeated_after_a_crash_replace_what_was_lost(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    resumed = line(10, **{"progress/resumed": 1.0})
    path.write_text(line(10, a=1.0) + line(20, a=2.0) + line(30, a=3.0) + resumed + line(20, a=4.0) + line(20, b=5.0))
    assert [(kept["progress/step"], kept.get("a"), kept.get("b")) for kept in read_metrics(path)] == [
        (10, 1.0, None),
        (20, 4.0, None),
        (20, None, 5.0),
    ]
