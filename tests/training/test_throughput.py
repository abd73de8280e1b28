"""Tokens a day, as Weights & Biases gets it, against a stopwatch beside the console."""

import json
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from training.config import DeviceName, RunConfig
from training.metrics import SECONDS_PER_DAY
from training.sinks import ConsoleSink
from training.trainer import Trainer
from training.world import open_world


def log_records(log: bytes) -> Iterator[bytes]:
    """Yield the records of a LevelDB log, which is what wandb's files are behind a head of 7 bytes.

    Blocks of 32 KiB hold parts, each behind 4 bytes of checksum, 2 of length and 1 that says which part of a record
    it is: the whole (1), its first (2), a middle (3) or its last (4).
    """
    whole, place = b"", 7
    while place + 7 <= len(log):
        if 2**15 - place % 2**15 < 7:  # too short for a part's head: filled with zeros
            place += 2**15 - place % 2**15
            continue
        length, part = struct.unpack_from("<HB", log, place + 4)
        whole += log[place + 7 : place + 7 + length]
        place += 7 + length
        if part in (1, 4):
            yield whole
            whole = b""


def wandb_history(folder: Path) -> list[dict[str, float]]:
    """Return what an offline run's file holds, a dictionary for each call of ``log``."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    history = []
    for data in log_records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            history.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    return history


def compare_with_a_stopwatch(config: RunConfig, device: DeviceName, monkeypatch: pytest.MonkeyPatch) -> None:
    read_s: list[float] = []
    write = ConsoleSink.write

    def look_at_the_watch(sink: ConsoleSink, metrics: dict[str, float]) -> None:
        read_s.append(time.monotonic())
        write(sink, metrics)

    monkeypatch.setattr(ConsoleSink, "write", look_at_the_watch)
    world = open_world(device)
    trainer = Trainer(config, world)
    trainer.fit()
    world.close()
    lines = [line for line in wandb_history(trainer.folder.path) if "throughput/tokens_per_day" in line]
    tokens = [line["progress/tokens"] for line in lines]
    assert len(lines) == len(read_s) - 2  # the first line has no figure, and the last is the evaluation's
    # The figures' windows follow one another, to the last. The watch starts with the second line: before the first is
    # written, a GPU loads the kernels that make its numbers, which is the next window's time.
    per_line = tokens[1] - tokens[0]
    by_wandb_s = sum(per_line / line["throughput/tokens_per_day"] * SECONDS_PER_DAY for line in lines[1:])
    assert by_wandb_s == pytest.approx(read_s[-2] - read_s[1], rel=0.01)


STEPS = ("logging.wandb=offline", "logging.every_steps=10", "train.num_steps=60", "checkpoint.every_steps=0")


def test_tokens_per_day_in_wandb_agree_with_an_outside_stopwatch(
    small_run: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="the extra 'wandb' is not installed")
    compare_with_a_stopwatch(small_run(*STEPS), DeviceName.cpu, monkeypatch)


@pytest.mark.gpu
def test_the_devices_clock_agrees_with_an_outside_stopwatch(
    small_run: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="the extra 'wandb' is not installed")
    config = small_run(*STEPS, "train.precision=bf16", "parallel.compile=false", "kernels=portable")
    compare_with_a_stopwatch(config, DeviceName.cuda, monkeypatch)
