from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from insitu.training.batching import collate, plan, separate, share_prompts
from insitu.training.shares import Share
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
    batch = collate(separate([Share(long, 0, 0.5), Share(short, 1, 0.25)]))
    assert batch.ids_bl.tolist() == [[5, 6, 7, 8], [9, 4, 0, 0]]
    assert batch.position_t.tolist() == [0, 2, 4]
    assert batch.target_t.tolist() == [6, 8, 4]
    assert batch.advantage_t.tolist() == [2.0, 2.0, -1.0]
    assert [round(x, 3) for x in batch.sampler_t.tolist()] == [-0.1, -0.2, -0.3]
    assert batch.weight_t.tolist() == [0.5, 0.5, 0.25]
    assert batch.rollout_t.tolist() == [0, 0, 1]
    assert collate([]).is_filler


def rollout(prompt: list[int], rest: list[int], mask: list[int], advantage: float = 1.0) -> TrainingSequence:
    flags = [0] * len(prompt) + mask
    return TrainingSequence("r", prompt + rest, flags, [-0.1 * i * f for i, f in enumerate(flags)], advantage)


def test_rollouts_of_one_prompt_share_it() -> None:
    one, two = rollout([1, 2, 3], [4, 5], [1, 1], 2.0), rollout([1, 2, 3], [6, 7, 8], [1, 0, 1], -1.0)
    other = rollout([1, 2], [9], [1])
    rows = share_prompts([Share(s, i, 1.0) for i, s in enumerate((one, other, two))], 4096)
    assert [(row.num_shared, row.length, len(row.shares)) for row in rows] == [(3, 8, 2), (2, 3, 1)]
    batch = collate(rows)
    assert batch.ids_bl.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 9, 0, 0, 0, 0, 0]]
    assert batch.target_t.tolist() == [4, 5, 6, 8, 9]
    assert batch.position_t.tolist() == [2, 3, 2, 6, 9]
    assert batch.advantage_t.tolist() == [2.0, 2.0, -1.0, -1.0, 1.0]
    assert batch.offset_bl is not None
    assert batch.offset_bl[0].tolist() == [0, 1, 2, 3, 4, 3, 4, 5]
    visible = batch.visible_bll()
    assert visible is not None
    assert visible[0, 6].nonzero().flatten().tolist() == [0, 1, 2, 5, 6]
    assert visible[0, 4].nonzero().flatten().tolist() == [0, 1, 2, 3, 4]
    assert visible.diagonal(dim1=1, dim2=2).all(), "a token that sees nothing would be NaN"


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 900)), max_size=20), st.sampled_from([50, 900, 9000])
)
def test_sharing_keeps_every_sequence_and_bounds_the_rows(shapes: list[tuple[int, int]], limit: int) -> None:
    sequences = [rollout([prompt] * (40 * prompt + 1), [5] * n, [1] * n) for prompt, n in shapes]
    rows = share_prompts([Share(s, 0, 1.0) for s in sequences], limit)
    kept = [share.sequence for row in rows for share in row.shares]
    assert sorted(map(id, kept)) == sorted(map(id, sequences))
    for row in rows:
        assert len({tuple(s.sequence.token_ids[: row.num_shared]) for s in row.shares}) == 1
        assert len(row.shares) == 1 or row.length <= min(limit, 2048)
