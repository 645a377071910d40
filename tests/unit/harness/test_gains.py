"""What a model scores, how sure that is, and whether another one is better: figures against known truths."""

from __future__ import annotations

import math

import numpy as np
import pytest

from insitu.datasets.example import Example
from insitu.errors import InvalidRequest
from insitu.harness.gains.clusters import read_clusters
from insitu.harness.gains.gain import Gain, GainOutcome, compare
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
        "The difference of these two checkpoints is real: run@3 is better than base (+0.4"
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


# Failures and clusters


def with_failures(*examples: tuple[float | None, ...]) -> Measurement:
    return Measurement.of((str(index), reward) for index, row in enumerate(examples) for reward in row)


def test_a_model_that_fails_where_it_is_wrong_is_not_better() -> None:
    before = with_failures(*[(1.0, 0.0, 0.0, 0.0)] * 20)
    after = with_failures(*[(1.0, None, None, None)] * 20)
    gain = compare(before, after)
    assert gain is not None
    assert gain.difference == 0.75
    assert gain.with_failures is not None
    assert gain.with_failures.value == 0.0
    assert gain.outcome is GainOutcome.UNCLEAR
    assert gain.num_failed == (0, 60)
    sentence = gain.sentence("base", "run@3")
    assert "run@3 is better only while failed rollouts are left out (+0.750" in sentence
    assert sentence.endswith(
        "0 rollouts failed before and 60 after; at the lowest reward they make it +0.000, 95 % interval "
        "+0.000 to +0.000."
    )
    assert Gain.from_dict(gain.to_dict()) == gain


def test_a_gain_that_holds_with_failures_is_real() -> None:
    before = with_failures(*[(0.0, 0.0, 0.0, 0.0)] * 20)
    gain = compare(before, with_failures(*[(1.0, 1.0, 1.0, None)] * 20))
    assert gain is not None
    assert gain.outcome is GainOutcome.BETTER
    assert "at the lowest reward they make it +0.750" in gain.sentence("base", "run@3")


def test_the_backwards_case_is_called_better_in_two_percent_at_most() -> None:
    """Worse by 0.05 in truth, and half of the wrong rollouts overflow: 45 % were called better before."""
    random, better = np.random.default_rng(3), 0
    for _ in range(200):
        rates = np.clip(random.beta(1, 1, 64), 0.02, 0.98)
        right = random.random((64, 4)) < 0.9 * rates[:, None]
        failed = ~right & (random.random((64, 4)) < 0.5)
        rows = [
            tuple(None if gone else float(is_right) for is_right, gone in zip(*pair, strict=True))
            for pair in zip(right, failed, strict=True)
        ]
        first = random.random((64, 4)) < rates[:, None]
        gain = compare(with_failures(*[tuple(map(float, row)) for row in first]), with_failures(*rows))
        assert gain is not None
        better += gain.outcome is GainOutcome.BETTER
    assert better <= 4


@pytest.mark.parametrize(("examples", "clusters", "effect"), [(60, 12, 0.8), (100, 10, 0.8)])
def test_clusters_without_a_mean_effect_are_seldom_called_real(
    examples: int, clusters: int, effect: float
) -> None:
    random, real, runs = np.random.default_rng(11), 0, 500
    names = {str(index): str(index * clusters // examples) for index in range(examples)}
    each = examples // clusters
    for _ in range(runs):
        odds = random.normal(0, 0.7, clusters).repeat(each) + random.normal(0, 0.5, examples)
        shifted = odds + random.normal(0, effect, clusters).repeat(each)
        sides = [
            Measurement(
                {
                    str(index): [float(hit) for hit in random.random(4) < 1 / (1 + np.exp(-own))]
                    for index, own in enumerate(side)
                }
            )
            for side in (odds, shifted)
        ]
        gain = compare(*sides, clusters=names)
        assert gain is not None
        assert gain.num_clusters == clusters
        real += gain.outcome in (GainOutcome.BETTER, GainOutcome.WORSE)
    assert real / runs <= 0.06


def test_clusters_are_named_and_too_few_of_them_are_told() -> None:
    first, second = measured(*[(0.0,)] * 32), measured(*[(1.0,)] * 32)
    gain = compare(first, second, clusters={str(index): str(index % 4) for index in range(32)})
    assert gain is not None
    assert gain.outcome is GainOutcome.TOO_FEW
    assert "Too few clusters to compare b with a: 8 are needed (+1.000, 32 examples in 4 clusters)." in (
        gain.sentence("a", "b")
    )


def test_a_key_that_rows_lack_is_rejected() -> None:
    rows = [Example("a", "?", "!", {"document": 3}), Example("b", "?", "!", {"document": 4})]
    assert read_clusters(rows, None) is None
    assert read_clusters(rows, "document") == {"a": "3", "b": "4"}
    with pytest.raises(InvalidRequest, match=r"cluster_key names 'dokument', which example 'a' does"):
        read_clusters(rows, "dokument")
