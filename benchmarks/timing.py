"""What benchmarks share: milliseconds of GPU steps that take turns, a limit on what tuning may take, and records."""

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import torch

ROUND_MS = 100.0  # of timed work per contender and round
_HEAD_START_MS, _MOST_HEAD_START_MS = 3.0, 300.0  # of the device waiting
_CYCLES_PER_MS = 2_000_000  # nearly, without load

Step = Callable[[], object]


class Outlasted(BaseException):
    """The time that a step was given is over. No Exception, because tuners that try candidates catch all of those."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise ``Outlasted`` in this (the main) thread once ``seconds`` have passed; 0 sets no limit."""

    def give_up(*_: object) -> None:
        raise Outlasted

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def first_call_s(step: Step) -> float:
    """Return the seconds of one call, its compilation included."""
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def time_ms(step: Step, repeats: int, lead: int = 0, head_start_ms: float = _HEAD_START_MS) -> float:
    """Return milliseconds per call of ``repeats`` calls, one after the other, on the device, after ``lead`` others.

    The device first waits for ``head_start_ms``, as it does in a training step whose host is ahead: else the time would
    hold the host's for the first launches.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(head_start_ms * _CYCLES_PER_MS))
    for _ in range(lead):
        step()
    start.record()
    for _ in range(repeats):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def in_turns(steps: Mapping[str, Step], rounds: int, round_ms: float = ROUND_MS) -> dict[str, float]:
    """Return each step's median milliseconds per call over rounds that go through the steps in turn.

    A card at its power limit changes its clocks with what ran in the last tens of milliseconds: by up to a fifth
    (docs/kernels.md). So a step first runs untimed for as long as it is timed, which leaves what ran before it out of
    its time, and each round starts with the next step, so that none always follows the same one.

    A step whose calls the host queues hardly faster than the device runs them is timed after a head start in which
    they are all queued (as far as the driver's queue takes them): what is compared is the devices' work.
    """
    if not steps:
        return {}
    times: dict[str, list[float]] = {name: [] for name in steps}
    repeats, head_start_ms = {}, {}
    for name, step in steps.items():
        ms = time_ms(step, 2)
        repeats[name] = max(2, round(round_ms / ms))
        queueing_ms = host_ms(step)
        all_queued_ms = 1.2 * queueing_ms * 2 * repeats[name]
        head_start_ms[name] = min(all_queued_ms, _MOST_HEAD_START_MS) if 2 * queueing_ms > ms else _HEAD_START_MS
    names = list(steps)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            ms = time_ms(steps[name], repeats[name], lead=repeats[name], head_start_ms=head_start_ms[name])
            times[name].append(ms)
    return {name: sorted(measured)[rounds // 2] for name, measured in times.items()}


def host_ms(step: Step, repeats: int = 10) -> float:
    """Return milliseconds in which the host queues one call: above the device's, it is the host that limits."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e3 * elapsed / repeats


def graph_of(step: Step) -> Step:
    """Return the replay of a CUDA graph of ``step``."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def launches_of(step: Step) -> list[tuple[str, float]]:
    """Return name and microseconds of every kernel, copy and fill that one call puts on the device."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    on_device = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [(event.name[:80], event.time_range.elapsed_us()) for event in on_device]


def new_record(**fields: object) -> dict:
    """Return the start of a benchmark's JSON: where, when and of what it was measured, and ``fields``."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"gpu": gpu, "date": date.today().isoformat(), "commit": _commit(), "torch": torch.__version__, **fields}


def write_record(record: dict, path: Path | None) -> None:
    """Write ``record`` to ``path``, if there is one."""
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + (" and changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):  # no git, or no repository
        return "uncommitted tree"
