"""A limit on what a peer's tuning may take stops it, and stops nothing else."""

import contextlib
import time

import pytest

from benchmarks import timing
from benchmarks.timing import Outlasted, in_turns, new_record, time_limit, write_record


def try_candidates_for(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        with contextlib.suppress(Exception):  # what tuners do with a candidate that fails
            time.sleep(0.01)


def test_a_call_that_outlasts_its_time_is_stopped_even_where_it_catches_exceptions():
    start = time.perf_counter()
    with pytest.raises(Outlasted), time_limit(0.1):
        try_candidates_for(30)
    assert time.perf_counter() - start < 10


def test_a_call_within_its_time_is_left_alone_and_so_is_what_follows():
    with time_limit(0.05):
        pass
    with time_limit(0.0):
        time.sleep(0.1)
    time.sleep(0.1)


def test_no_step_always_follows_the_same_one_and_each_runs_untimed_first(monkeypatch):
    calls = []

    def time_ms(step, repeats, lead=0, head_start_ms=None):
        calls.append((step(), repeats, lead))
        return 1.0

    monkeypatch.setattr(timing, "time_ms", time_ms)
    monkeypatch.setattr(timing, "host_ms", lambda step: 0.1)
    assert in_turns({name: lambda name=name: name for name in "abc"}, 3, round_ms=5.0) == {"a": 1, "b": 1, "c": 1}
    assert [name for name, *_ in calls] == ["a", "b", "c", *"abc", *"bca", *"cab"]
    assert {(repeats, lead) for _, repeats, lead in calls[3:]} == {(5, 5)}


def test_calls_that_the_host_queues_slowly_are_queued_before_the_device_begins(monkeypatch):
    head_starts = {}

    def time_ms(step, repeats, lead=0, head_start_ms=3.0):
        head_starts[step()] = head_start_ms
        return 1.0

    monkeypatch.setattr(timing, "time_ms", time_ms)
    monkeypatch.setattr(timing, "host_ms", lambda step: step())  # each step gives the milliseconds of its host
    in_turns({name: lambda name=name: name for name in (0.4, 0.6, 1.5, 40.0)}, 1, round_ms=50.0)
    assert head_starts == {0.4: 3.0, 0.6: pytest.approx(72), 1.5: pytest.approx(180), 40.0: 300.0}


def test_a_record_says_where_and_when_and_is_written_where_asked(tmp_path):
    record = new_record(shapes={})
    assert set(record) == {"gpu", "date", "commit", "torch", "shapes"}
    write_record(record, None)
    write_record(record, tmp_path / "record.json")
    assert (tmp_path / "record.json").read_text(encoding="utf-8").endswith("}\n")
