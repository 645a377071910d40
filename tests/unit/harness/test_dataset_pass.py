"""The order of a pass: a permutation that seed and epoch determine, cut into steps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from insitu.datasets.example import Example
from insitu.harness.loop.dataset_pass import DatasetPass, dataset_digest


@given(st.integers(1, 200), st.integers(1, 50), st.integers(0, 5), st.integers(0, 5))
def test_the_steps_of_a_pass_hold_every_example_once(count: int, size: int, seed: int, epoch: int) -> None:
    made = DatasetPass.shuffled(count, size, seed, epoch)
    steps = [made.step_at(start) for start in range(0, count, size)]
    assert len(steps) == made.num_steps
    assert {len(step) for step in steps[:-1]} <= {size}
    assert sorted(index for step in steps for index in step) == list(range(count))
    assert made.step_at(count) == ()


def test_the_order_is_that_of_every_machine_and_release() -> None:
    """A run resumed by another Python must go on in the same order."""
    assert DatasetPass.shuffled(8, 3, 0, 0).order == (7, 4, 1, 2, 3, 0, 6, 5)
    orders = {DatasetPass.shuffled(100, 3, seed, epoch).order for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_a_dataset_is_known_by_its_ids_in_order() -> None:
    def digest(*ids: str) -> str:
        return dataset_digest([Example(each, "question", None, {}) for each in ids])

    assert digest("a", "b") == digest("a", "b")
    assert len({digest("a", "b"), digest("b", "a"), digest("ab"), digest("a"), digest()}) == 5
