from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from insitu.training.batching import collate, score_batch
from insitu.training.objective import Share
from insitu.training.packing import pack, plan
from tests.support.sequences import make_sequence, parts_of
from tests.support.trees import random_shares


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120), st.integers(1, 4))
def test_every_row_is_in_one_micro_batch_within_the_budget(
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


@given(
    st.integers(0, 10**6),
    st.integers(1, 8),
    st.sampled_from([1, 50, 200, 9000]),
    st.integers(1, 4),
    st.booleans(),
)
def test_packing_keeps_every_sequence_within_the_budget(
    seed: int, num_groups: int, limit: int, world_size: int, can_branch: bool
) -> None:
    shares = random_shares(seed, num_groups)
    packing = pack(shares, limit, world_size, can_branch)
    assert len(packing.ranks) == world_size
    assert len({len(rank) for rank in packing.ranks}) == 1, "ranks must run equally many micro-batches"
    rows = [row for rank in packing.ranks for row in rank if row.members]
    assert sorted(id(packing.shares[i]) for row in rows for i in row.members) == sorted(map(id, shares))
    every = [collate(part) for rank in range(world_size) for part in parts_of(packing, rank)]
    batches = [batch for batch in every if not batch.is_filler]
    longest = max(len(share.sequence.token_ids) for share in shares)
    for row, batch in zip(rows, batches, strict=True):
        room = max(limit, int(1.25 * longest)) if can_branch else limit
        assert len(row.members) == 1 or batch.ids_bl.numel() <= room
    assert sum(batch.ids_bl.numel() for batch in batches) == packing.num_computed_tokens
    if can_branch:
        assert packing.num_computed_tokens <= sum(len(share.sequence.token_ids) for share in shares)


def test_every_rank_gets_nearly_as_much_work() -> None:
    shares = [share_of([group] * 30 + [40 + answer] * 12, 30) for group in range(16) for answer in range(8)]
    for world_size in (2, 3, 4):
        packing = pack(shares, 512, world_size)
        batches = [[collate(part) for part in parts_of(packing, rank)] for rank in range(world_size)]
        loads = [sum(b.ids_bl.numel() for b in own if not b.is_filler) for own in batches]
        assert max(loads) <= 1.15 * min(loads)
        assert sum(loads) <= 1.1 * pack(shares, 512, 1).num_computed_tokens


def test_one_large_tree_keeps_two_ranks_busy() -> None:
    packing = pack([share_of([1] * 30 + [40 + answer] * 20, 30) for answer in range(8)], 4096, 2)
    assert [len(row.members) for rank in packing.ranks for row in rank] == [4, 4]


def test_long_histories_are_shared_although_each_fills_the_budget_alone() -> None:
    packing = pack([share_of([1] * 900 + [40 + answer] * 20, 900) for answer in range(8)], 512, 1)
    assert packing.num_computed_tokens == 900 + 8 * 19


def test_no_sequences_are_no_work() -> None:
    packing = pack([], 100, 2)
    assert packing.ranks == [[], []]
    assert parts_of(packing, 1) == []


def test_a_rank_without_a_row_gets_a_filler() -> None:
    packing = pack([share_of([1, 2, 3], 1)], 100, 2)
    (filled,), (idle,) = parts_of(packing, 0), parts_of(packing, 1)
    assert not collate(filled).is_filler
    assert collate(idle).is_filler


def share_of(ids: list[int], num_prompt: int, rollout: int = 0, weight: float = 1.0) -> Share:
    return masked(ids, [0] * num_prompt + [1] * (len(ids) - num_prompt), 1.0, rollout, weight)


def masked(ids: list[int], mask: list[int], advantage: float, rollout: int, weight: float) -> Share:
    logprobs = [-0.1 * i * flag for i, flag in enumerate(mask)]
    return Share(make_sequence("r", ids, mask, logprobs, advantage), rollout, weight)


def test_padded_rows_point_each_sampled_token_at_the_state_before_it() -> None:
    long, short = masked([5, 6, 7, 8], [0, 1, 0, 1], 2.0, 0, 0.5), masked([9, 4, 3], [0, 1, 0], -1.0, 1, 0.25)
    (part,) = parts_of(pack([short, long], 100, 1, can_branch=False))
    batch = collate(part)
    assert batch.ids_bl.tolist() == [[5, 6, 7], [9, 0, 0]], "what follows the last predictor is left out"
    assert batch.predictor_u[batch.pick_t].tolist() == [0, 2, 3]
    assert batch.target_u[batch.pick_t].tolist() == [6, 8, 4]
    assert batch.advantage_t.tolist() == [2.0, 2.0, -1.0]
    assert batch.weight_t.tolist() == [0.5, 0.5, 0.25]
    assert batch.rollout_t.tolist() == [0, 0, 1]
    assert [round(x, 3) for x in batch.sampler_t.tolist()] == [-0.1, -0.3, -0.1]
    assert batch.end_bl is None


def test_a_forest_shares_prompts_turns_and_equal_samples() -> None:
    shares = [
        masked([1, 2, 3, 4, 5], [0, 0, 0, 1, 1], 2.0, 0, 0.5),
        masked([1, 2, 3, 4, 6, 7], [0, 0, 0, 1, 0, 1], -1.0, 1, 0.25),  # the same first token, then a tool
        masked([1, 2, 9], [0, 0, 1], 3.0, 1, 0.25),  # a prefix break after two tokens
        masked([8, 2, 9], [0, 1, 1], 1.0, 2, 1.0),  # another tree
    ]
    packing = pack(shares, 100, 1)
    (part,) = parts_of(packing)
    batch = collate(part)
    assert part.columns.rollout_n.tolist() == [1, 0, 1, 2]
    assert batch.ids_bl.tolist() == [[1, 2, 3, 4, 6, 8, 2]]
    assert batch.depth_bl is not None
    assert batch.end_bl is not None
    assert batch.depth_bl.tolist() == [[0, 1, 2, 3, 4, 0, 1]]
    assert batch.end_bl.tolist() == [[5, 5, 5, 5, 5, 7, 7]]
    assert batch.predictor_u[batch.pick_t].tolist() == [1, 2, 3, 2, 4, 5, 6]
    assert batch.target_u[batch.pick_t].tolist() == [9, 4, 5, 4, 7, 2, 9]
    assert len(batch.target_u) == 6, "two rollouts sampled the same token: one logit for both"
    assert batch.advantage_t.tolist() == [3.0, 2.0, 2.0, -1.0, -1.0, 1.0, 1.0]
    assert batch.rollout_t.tolist() == [1, 0, 0, 1, 1, 2, 2]
    assert packing.num_computed_tokens == 7


def test_scoring_asks_for_every_token_after_the_first() -> None:
    batch = score_batch([[5, 6, 7], [8, 9]])
    assert batch.ids_bl.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch.predictor_u[batch.pick_t].tolist() == [0, 1, 3]
    assert batch.target_u[batch.pick_t].tolist() == [6, 7, 9]
    assert not batch.is_filler
