import pytest

from training.metrics import SECONDS_PER_DAY, STEP_PARTS, Stopwatch


class FakeClock:
    """Moves only when told to."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def run_window(clock: FakeClock, watch: Stopwatch, *, steps: int = 10, eval_s: float = 0.0) -> dict[str, float]:
    for _ in range(steps):
        for part, seconds in (("data", 0.1), ("forward", 0.3), ("backward", 0.5), ("optimizer", 0.1)):
            clock.now += seconds
            watch.lap(part)
        watch.count_step(1000)
    if eval_s:
        clock.now += eval_s
        watch.lap("eval")
    return watch.window(num_devices=2)


def test_tokens_per_day_is_tokens_over_step_time() -> None:
    clock = FakeClock(5.0)
    watch = Stopwatch(clock)
    run_window(clock, watch)
    metrics = run_window(clock, watch)
    assert metrics["throughput/tokens_per_day"] == pytest.approx(1000 * SECONDS_PER_DAY)
    assert metrics["throughput/tokens_per_s_per_gpu"] == pytest.approx(500)
    assert metrics["time/step_s"] == pytest.approx(1.0)


def test_parts_of_a_step_sum_to_the_step() -> None:
    clock = FakeClock()
    watch = Stopwatch(clock)
    run_window(clock, watch)
    metrics = run_window(clock, watch, eval_s=7.0)
    assert sum(metrics[f"time/{part}_s"] for part in STEP_PARTS) == pytest.approx(metrics["time/step_s"])
    assert metrics["time/eval_s"] == pytest.approx(7.0)


def test_evaluation_slows_only_the_wall_figure() -> None:
    clock, other_clock = FakeClock(), FakeClock()
    watch, other_watch = Stopwatch(clock), Stopwatch(other_clock)
    for plain, with_eval in ((run_window(clock, watch), run_window(other_clock, other_watch, eval_s=30.0)),):
        assert with_eval["throughput/tokens_per_day_wall"] == pytest.approx(
            plain["throughput/tokens_per_day_wall"] * 10 / 40
        )
    plain, with_eval = run_window(clock, watch), run_window(other_clock, other_watch, eval_s=30.0)
    assert with_eval["throughput/tokens_per_day"] == pytest.approx(plain["throughput/tokens_per_day"])


def test_first_window_after_a_start_has_no_step_throughput() -> None:
    clock = FakeClock()
    metrics = run_window(clock, Stopwatch(clock))
    assert "throughput/tokens_per_day" not in metrics
    assert metrics["throughput/tokens_per_day_wall"] > 0


def test_a_resumed_process_counts_its_own_tokens_only() -> None:
    clock = FakeClock()
    first = Stopwatch(clock)
    run_window(clock, first, steps=1000)
    clock.now += 12345.0
    assert run_window(clock, Stopwatch(clock))["throughput/tokens_per_day_wall"] == pytest.approx(
        1000 * SECONDS_PER_DAY
    )
