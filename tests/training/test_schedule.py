from itertools import pairwise

import pytest

from training.schedule import cosine_factor, wsd_factor

SCHEDULE = {"num_steps": 100, "warmup_steps": 10, "final_fraction": 0.1}


def test_warm_up_rises_linearly_to_the_peak() -> None:
    factors = [cosine_factor(step, **SCHEDULE) for step in range(11)]
    assert factors == pytest.approx([(step + 1) / 11 for step in range(11)])
    assert factors[10] == 1.0


def test_cosine_falls_to_the_final_fraction() -> None:
    factors = [cosine_factor(step, **SCHEDULE) for step in range(10, 101)]
    assert all(later < earlier for earlier, later in pairwise(factors))
    assert factors[45] == pytest.approx((1 + 0.1) / 2)
    assert factors[-1] == pytest.approx(0.1)
    assert cosine_factor(1000, **SCHEDULE) == pytest.approx(0.1)


def test_no_warm_up_starts_at_the_peak() -> None:
    assert cosine_factor(0, num_steps=10, warmup_steps=0, final_fraction=0.0) == 1.0


def test_warm_up_for_the_whole_run_never_exceeds_the_peak() -> None:
    factors = [cosine_factor(step, num_steps=5, warmup_steps=5, final_fraction=0.1) for step in range(5)]
    assert max(factors) < 1.0


def test_wsd_is_flat_between_warm_up_and_a_linear_decay() -> None:
    factors = [wsd_factor(step, **SCHEDULE, decay_steps=20) for step in range(101)]
    assert factors[:10] == pytest.approx([(step + 1) / 11 for step in range(10)])
    assert set(factors[10:81]) == {1.0}
    assert factors[80:] == pytest.approx([1 - 0.9 * step / 20 for step in range(21)])
