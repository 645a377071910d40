from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from insitu.training.batching import collate, plan
from insitu.types import TrainingSequence


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120), st.integers(1, 4))
def test_every_sequence_is_in_one_micro_batch_within_the_budget(
    lengths: list[int], budget: int, world_size: int
) -> None:
    ranks = plan(lengths, budget, world_size)
    assert len(ranks) == world_size
    assert len({len(batches) for batches in ranks}) == 1, "ranks must run equally many micro-batches"
    assert sorted(i for batches in ranks for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in (batch for batches in ranks for batch in batches if batch):
        width = max(lengths[i] for i in batch)
        assert len(batch) == 1 or len(batch) * width <= budget


def test_ranks_carry_nearly_the_same_tokens() -> None:
    lengths = [(7 * i) % 50 + 1 for i in range(64)]
    loads = [sum(lengths[i] for batch in batches for i in batch) for batches in plan(lengths, 256, 2)]
    assert abs(loads[0] - loads[1]) <= max(lengths)


def test_collate_points_each_sampled_token_at_the_state_before_it() -> None:
    long = TrainingSequence("a", [5, 6, 7, 8], [0, 1, 0, 1], [0.0, -0.1, 0.0, -0.2], 2.0)
    short = TrainingSequence("b", [9, 4], [0, 1], [0.0, -0.3], -1.0)
    batch = collate([long, short])
    assert batch.ids_bl.tolist() == [[5, 6, 7, 8], [9, 4, 0, 0]]
    assert batch.position_t.tolist() == [0, 2, 4]
    assert batch.target_t.tolist() == [6, 8, 4]
    assert batch.advantage_t.tolist() == [2.0, 2.0, -1.0]
    assert [round(x, 3) for x in batch.old_t.tolist()] == [-0.1, -0.2, -0.3]
    assert collate([]).is_filler
