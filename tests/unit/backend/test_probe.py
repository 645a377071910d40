"""The probe tells new weights from old ones, at any noise."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from insitu.backend.serving.probe import compare, judge, probe_sequences
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


def test_sequences_stay_fixed(tmp_path: Path) -> None:
    def batch(start: int) -> list[TrainingSequence]:
        ids = [list(range(start + i, start + i + 200)) for i in range(30)]
        return [make_sequence(str(i), row, [1] * 200, [0.0] * 200, float(i % 2)) for i, row in enumerate(ids)]

    first = probe_sequences(tmp_path / "run" / "probe.json", batch(0))
    again = probe_sequences(tmp_path / "run" / "probe.json", batch(1000))
    assert first == again
    assert 0 < len(first) <= 6
    assert all(len(ids) <= 96 for ids in first)
