"""The probe tells new weights from old ones, at any noise."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from insitu.backend.serving.probe import (
    NO_NOISE,
    Noise,
    ProbeResult,
    compare,
    judge,
    noise_of,
    probe_sequences,
)
from insitu.errors import ProbeFailed
from insitu.types import TrainingSequence
from tests.support.sequences import make_sequence


def scores(noise: float, step: float, seed: int = 0, tokens: int = 300):
    """Trainer before and after a step, an engine before, and the engine after with new and with old weights.

    The engine has an offset of its own (other kernels), and fresh noise when its weights change.
    """
    rng = random.Random(seed)
    t0 = [[-rng.random() * 5 for _ in range(tokens)]]
    t1 = [[x + rng.gauss(0, step) for x in t0[0]]]
    s0 = [[x + rng.gauss(0, noise) for x in t0[0]]]
    moved = [[s + (b - a) + rng.gauss(0, noise) for s, a, b in zip(s0[0], t0[0], t1[0], strict=True)]]
    return t0, t1, s0, moved


@pytest.mark.parametrize("noise", [1e-6, 1e-3, 0.05])
@pytest.mark.parametrize("step", [1e-3, 0.03, 0.5])
def test_new_weights_pass_and_old_ones_fail(noise: float, step: float) -> None:
    for seed in range(20):
        t0, t1, s0, moved = scores(noise, step, seed)
        judge(compare(t0, t1, s0, moved), 10.0, "replica-0", "run@1")
        with pytest.raises(ProbeFailed, match="still answers with the old weights"):
            judge(compare(t0, t1, s0, s0), 10.0, "replica-0", "run@1")


def test_without_an_update_the_engine_need_not_move() -> None:
    t0, t1, s0, _ = scores(1e-6, 1e-3)
    judge(compare(t0, t1, s0, s0), 10.0, "replica-0", "run@1", must_move=False)


def test_disagreement_beyond_the_threshold_fails_with_the_figure() -> None:
    with pytest.raises(ProbeFailed, match=r"mean \|Δlogprob\| 0.5 over 2 tokens, tolerated 0.25"):
        judge(compare([[0.0, 0.0]], [[-1.0, -1.0]], [[0.0, 0.0]], [[-1.5, -1.5]]), 0.25, "replica-0", "run@1")


def test_an_engine_that_answers_nan_fails() -> None:
    with pytest.raises(ProbeFailed):
        judge(compare([[0.0]], [[1.0]], [[0.0]], [[float("nan")]]), 0.25, "replica-0", "run@1")


def test_a_step_without_change_cannot_be_told() -> None:
    result = compare([[1.0, 2.0]], [[1.0, 2.0]], [[1.0, 2.0]], [[1.0, 2.0]])
    assert result.moved is None
    judge(result, 0.1, "replica-0", "run@1")
    assert "probe/moved" not in result.metrics()


def noisy(rows: list[list[float]], noise: float, seed: int) -> list[list[float]]:
    rng = random.Random(seed)
    return [[x + rng.gauss(0, noise) for x in row] for row in rows]


def probed(noise: float, step: float, seed: int, *, new_weights: bool) -> ProbeResult:
    """An engine that scores with fresh noise every time; its noise is measured as the backend does."""
    t0, t1, _, _ = scores(0.0, step, seed)
    first, again = noisy(t0, noise, seed + 1), noisy(t0, noise, seed + 2)
    after = noisy(t1 if new_weights else t0, noise, seed + 3)
    return compare(t0, t1, first, after, noise_of(first, again))


def test_without_noise_the_verdict_is_that_of_equality() -> None:
    for seed in range(50):
        t0, t1, s0, moved = scores(1e-3 * seed, 0.01, seed)
        for after in (s0, moved):
            plain = compare(t0, t1, s0, after)
            assert compare(t0, t1, s0, after, noise_of(s0, s0)) == plain
            assert plain.moved is not None
            assert plain.can_tell
            assert plain.has_moved == (plain.moved >= 0.1)


@pytest.mark.parametrize("step", [1e-3, 0.03, 0.1, 0.3, 1.0])
def test_noise_is_not_called_a_move(step: float) -> None:
    for seed in range(0, 400, 4):
        result = probed(0.1, step, seed, new_weights=False)
        assert not (result.can_tell and result.has_moved)


@pytest.mark.parametrize("step", [0.5, 1.0])
def test_old_weights_fail_despite_the_noise(step: float) -> None:
    for seed in range(0, 400, 4):
        with pytest.raises(ProbeFailed, match="still answers with the old weights"):
            judge(probed(0.1, step, seed, new_weights=False), 10.0, "replica-0", "run@1")


@pytest.mark.parametrize("step", [1e-3, 0.03, 0.1, 0.3, 1.0])
def test_new_weights_pass_whatever_the_noise(step: float) -> None:
    for seed in range(0, 400, 4):
        result = probed(0.1, step, seed, new_weights=True)
        judge(result, 10.0, "replica-0", "run@1")
        assert result.has_moved or not result.can_tell


def test_a_change_below_the_noise_of_a_token_is_still_told() -> None:
    """Over 3,000 tokens noise cancels in the direction of the change: 0.14 does not hide 0.11."""
    t0, t1, _, _ = scores(0.0, 0.11, tokens=3000)
    first, again, old, new = (noisy(t, 0.1, seed) for seed, t in enumerate((t0, t0, t0, t1)))
    noise = noise_of(first, again)
    judge(compare(t0, t1, first, new, noise), 10.0, "replica-0", "run@1")
    with pytest.raises(ProbeFailed, match="still answers with the old weights"):
        judge(compare(t0, t1, first, old, noise), 10.0, "replica-0", "run@1")


def test_a_change_lost_in_the_noise_fails_no_step() -> None:
    result = probed(0.1, 1e-3, 0, new_weights=False)
    assert not result.can_tell
    judge(result, 10.0, "replica-0", "run@1")
    assert result.metrics()["probe/can_tell"] == 0.0


def test_noise_is_measured_per_token() -> None:
    assert noise_of([[0.0, 1.0], [2.0]], [[0.3, 1.0], [1.6]]) == Noise(
        pytest.approx(0.7 / 3), pytest.approx(0.4), pytest.approx((0.25 / 3) ** 0.5)
    )
    assert noise_of([], []) == NO_NOISE


def test_noise_adds_to_the_threshold_but_no_more_than_doubles_it() -> None:
    def after(gap: float, noise: float) -> ProbeResult:
        return compare([[0.0]], [[-1.0]], [[0.0]], [[-1.0 - gap]], Noise(noise, noise, noise))

    judge(after(0.3, 0.1), 0.25, "replica-0", "run@1")
    with pytest.raises(ProbeFailed, match=r"tolerated 0.35 \(0.1 is the engine's own noise\)"):
        judge(after(0.4, 0.1), 0.25, "replica-0", "run@1")
    with pytest.raises(ProbeFailed, match=r"tolerated 0\.5"):
        judge(after(8.0, 9.0), 0.25, "replica-0", "run@1")
    with pytest.raises(ProbeFailed):
        judge(after(0.1, float("nan")), 0.25, "replica-0", "run@1")


def test_sequences_stay_fixed(tmp_path: Path) -> None:
    def batch(start: int) -> list[TrainingSequence]:
        ids = [list(range(start + i, start + i + 200)) for i in range(30)]
        return [make_sequence(str(i), row, [1] * 200, [0.0] * 200, float(i % 2)) for i, row in enumerate(ids)]

    first = probe_sequences(tmp_path / "run" / "probe.json", batch(0))
    again = probe_sequences(tmp_path / "run" / "probe.json", batch(1000))
    assert first == again
    assert 0 < len(first) <= 6
    assert all(len(ids) <= 96 for ids in first)
