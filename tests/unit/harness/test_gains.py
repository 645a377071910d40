"""What a model scores, how sure that is, and whether another one is better: figures against known truths."""

from __future__ import annotations

import math

import numpy as np
import pytest

from insitu.harness.gains.gain import GainOutcome, compare
from insitu.harness.gains.interval import MIN_EXAMPLES, difference_interval
from insitu.harness.gains.measurement import Measurement, plus_minus
from tests.support.simulated_gains import Population, Runs, coverage

BETTER = Population("better", 4, 4, shift=0.8, scatter=0.7)
SAME = Population("the same", 4, 4)


def measured(*examples: tuple[float, ...]) -> Measurement:
    return Measurement({str(index): rewards for index, rewards in enumerate(examples)})


def test_samples_are_grouped_by_example_and_failures_are_not_zeros() -> None:
    found = Measurement.of([("a", 1.0), ("b", None), ("a", 0.0), ("c", 1.0), ("b", None)])
    assert found.rewards == {"a": [1.0, 0.0], "c": [1.0]}
    assert found.mean == 0.75, "each example counts the same"


def test_the_standard_error_is_that_of_the_examples_means() -> None:
    found = measured((1.0, 1.0, 1.0, 1.0), (0.0, 0.0, 0.0, 0.0))
    # By hand: means 1 and 0, standard deviation √½, over √2. The eight rewards alone would give 0.19.
    assert found.standard_error == pytest.approx(0.5)
    assert measured((1.0, 0.0)).standard_error is None, "one example does not tell how examples vary"
    assert Measurement({}).mean is None


def test_the_standard_error_is_the_spread_of_repeated_measurements() -> None:
    random = np.random.default_rng(3)
    means, errors = [], []
    for _ in range(300):
        rates = random.beta(0.8, 0.8, 40)
        rewards = (random.random((40, 4)) < rates[:, None]).astype(float)
        found = Measurement({str(index): list(row) for index, row in enumerate(rewards)})
        means.append(found.mean)
        errors.append(found.standard_error)
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.1)


def test_a_clear_difference_is_real_in_both_directions() -> None:
    low, high = measured(*[(0.0, 0.5)] * 20), measured(*[(0.5, 1.0)] * 19, (0.0, 0.0))
    gain = compare(low, high)
    assert gain is not None
    assert gain.interval is not None
    assert gain.outcome is GainOutcome.BETTER
    assert gain.interval.low < gain.difference < gain.interval.high
    assert gain.sentence("base", "run@3").startswith(
        "The difference is real: run@3 is better than base (+0.4"
    )
    back = compare(high, low)
    assert back is not None
    assert back.outcome is GainOutcome.WORSE
    assert "run@3 is worse than base" in back.sentence("base", "run@3")


def test_no_difference_is_not_announced() -> None:
    gain = compare(measured(*[(1.0,), (0.0,)] * 16), measured(*[(0.0,), (1.0,)] * 16))
    assert gain is not None
    assert gain.outcome is GainOutcome.UNCLEAR
    assert "the interval includes 0" in gain.sentence("a", "b")
    equal = compare(measured(*[(1.0,)] * 16), measured(*[(1.0,)] * 16))
    assert equal is not None
    assert equal.outcome is GainOutcome.UNCLEAR, "all equal: nothing was seen"


def test_rounding_is_not_a_difference() -> None:
    # The same means but for rounding: 0.15000000000000002 and 0.15.
    gain = compare(measured(*[(0.15, 0.15)] * 8), measured(*[(0.1, 0.2)] * 8))
    assert gain is not None
    assert (gain.difference, gain.outcome) == (0.0, GainOutcome.UNCLEAR)
    # The lower quantile is a draw whose sum is 0, and 8.5e-19 by rounding.
    tenths = [-0.2, 0.2, 0.1, 0.2, 1 / 3, 0.7, 0.7, 0.7, -0.1, -0.2, -0.3, 0.7, 0.1]
    found = difference_interval(tenths)
    assert found is not None
    assert found.low == 0.0


def test_too_few_examples_have_no_interval() -> None:
    few = [(0.0,)] * (MIN_EXAMPLES - 1)
    gain = compare(measured(*few), measured(*[(1.0,)] * len(few)))
    assert gain is not None
    assert (gain.outcome, gain.interval) == (GainOutcome.TOO_FEW, None)
    assert f"{MIN_EXAMPLES} are needed" in gain.sentence("a", "b")


def test_only_examples_with_rewards_on_both_sides_are_compared_and_the_others_counted() -> None:
    before = Measurement({"a": [0.0], "b": [1.0], "c": [1.0]})
    gain = compare(before, Measurement({"a": [1.0], "b": [1.0], "d": [0.0]}))
    assert gain is not None
    assert (gain.difference, gain.num_examples, gain.num_unpaired) == (0.5, 2, 2)
    assert "2 more without a reward on one side" in gain.figures()
    assert compare(before, Measurement({"d": [0.0]})) is None


def test_the_same_data_and_seed_give_the_same_interval() -> None:
    differences = list(np.random.default_rng(4).normal(size=12))
    assert difference_interval(differences) == difference_interval(differences)
    assert difference_interval(differences, seed=1) != difference_interval(differences)


def test_many_examples_are_resampled_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    differences = list(np.random.default_rng(0).normal(size=50))
    whole = difference_interval(differences)
    monkeypatch.setattr("insitu.harness.gains.interval._VALUES_AT_ONCE", 50 * 7)
    parts = difference_interval(differences)
    assert parts is not None
    assert whole is not None
    assert parts != whole, "the draws are others"
    assert (parts.low, parts.high) == pytest.approx((whole.low, whole.high), abs=0.03)


def test_the_interval_is_as_wide_as_students_for_normal_differences() -> None:
    differences = list(np.random.default_rng(5).normal(size=10))
    found = difference_interval(differences)
    assert found is not None
    student = 2.2622 * float(np.std(differences, ddof=1)) / math.sqrt(10)  # t of 9 degrees at 97.5 %
    assert (found.high - found.low) / 2 == pytest.approx(student, rel=0.08)


def test_the_best_of_several_needs_more_evidence() -> None:
    one, other = measured(*[(0.0,)] * 20), measured(*[(1.0,), (0.0,)] * 10)
    alone, chosen = compare(one, other), compare(one, other, num_candidates=10)
    assert alone is not None
    assert chosen is not None
    assert alone.interval is not None
    assert (alone.confidence, chosen.confidence) == (0.95, 0.99)
    assert chosen.interval is not None
    assert chosen.interval.low < alone.interval.low
    assert "99 % interval" in chosen.figures()


def test_a_mean_is_shown_with_its_error() -> None:
    assert plus_minus(0.6159, 0.0408) == "0.616 ± 0.041"
    assert plus_minus(0.6159, None, 4) == "0.6159"


# Short versions of benchmarks/interval.py: few repetitions, so the bounds are wider here.


def test_intervals_hold_the_true_difference() -> None:
    assert 0.90 <= coverage(BETTER, 32, 4, 200) <= 0.98


def test_a_run_without_a_change_is_rarely_announced_as_an_improvement() -> None:
    assert Runs(SAME, 32, 4).announced(150) <= 0.05
    # With greedy answers, measuring again repeats the luck of the first time; the wider interval covers it.
    assert Runs(SAME, 32, 4, greedy=True).announced(150) <= 0.08
    assert Runs(SAME, 32, 4, greedy=True, corrected=False).announced(150) > 0.05, "without it, too often"


def test_a_real_gain_is_announced() -> None:
    assert Runs(BETTER, 64, 4).announced(40) >= 0.8
