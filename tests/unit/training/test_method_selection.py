"""What each method takes of its groups: every rollout and every call has one fate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.errors import InvalidRequest
from insitu.records.call_tokens import CallTokens, call_tokens
from insitu.training.selection import Batch, build_batch
from insitu.types import Ending, Method, ModelCall, StepSettings, Trajectory, TrajectoryGroup

STORE: dict[str, CallTokens] = {}
REASONS = ("zero_variance", "stale", "truncated", "constrained", "below_min_reward", "not_in_pair")


@pytest.fixture(autouse=True)
def empty() -> None:
    STORE.clear()


def read(ids: Sequence[str]) -> dict[str, CallTokens]:
    return {call_id: STORE[call_id] for call_id in ids}


def call(name: str, **fields: object) -> str:
    made = ModelCall(name, "r", "run", "run", 5, "run@5", [1, 2], [3, 4], [-0.5, -0.25], "stop")
    STORE[name] = call_tokens(replace(made, **fields))  # type: ignore[arg-type]
    return name


def rollout(name: str, reward: float, ending: Ending = Ending.COMPLETED, **fields: object) -> Trajectory:
    return Trajectory(name, [call(f"call-{name}", **fields)], reward, ending)


def batch(rollouts: list[Trajectory], step: StepSettings) -> Batch:
    return build_batch([TrajectoryGroup("g", "run", rollouts)], read, step, 5)


def sides(made: Batch) -> dict[str, float]:
    return {s.rollout_id: float(s.advantages[-1]) for s in made.sequences}


def counts(made: Batch) -> dict[str, int]:
    names = ("trained", *REASONS)
    return {name: int(value) for name in names if (value := made.metrics.get(f"account/{name}"))}


def test_a_teacher_judges_answers_that_were_cut_off_too() -> None:
    group = [rollout("a", 0.0, Ending.LENGTH, finish_reason="length"), rollout("b", 1.0)]
    judged = batch(group, StepSettings(method="distill", teacher="run@1"))
    assert (set(sides(judged)), counts(judged)) == ({"a", "b"}, {"trained": 2})
    imitated = batch(group, StepSettings(method="sft"))
    assert (set(sides(imitated)), counts(imitated)) == ({"b"}, {"trained": 1, "truncated": 1})


def test_sft_takes_all_or_those_of_enough_reward() -> None:
    group = [rollout("a", 0.0), rollout("b", 0.5), rollout("c", 0.5), rollout("d", 1.0)]
    every = batch(group, StepSettings(method="sft"))
    assert sides(every) == dict.fromkeys("abcd", 1.0)
    assert "account/below_min_reward" not in every.metrics
    best = batch(group, StepSettings(method="sft", min_reward=0.5))
    assert (sides(best), counts(best)) == (dict.fromkeys("bcd", 1.0), {"trained": 3, "below_min_reward": 1})
    none = batch(group, StepSettings(method="sft", min_reward=2.0))
    assert (none.sequences, counts(none)) == ([], {"below_min_reward": 4})
    equal = batch(group[1:3], StepSettings(method="sft"))
    assert counts(equal) == {"trained": 2}
    assert "advantage/mean" not in equal.metrics, "there are no advantages"
    assert equal.metrics["reward/mean"] == 0.5


def test_dpo_takes_the_best_against_the_worst_and_the_first_of_equals() -> None:
    step = StepSettings(method="dpo")
    group = [rollout(name, reward) for name, reward in zip("abcde", (0.5, 0.0, 1.0, 1.0, 0.0), strict=True)]
    made = batch(group, step)
    assert list(sides(made).items()) == [("c", 1.0), ("b", -1.0)], "the chosen one comes first"
    assert counts(made) == {"trained": 2, "not_in_pair": 3}
    assert made.metrics["account/calls_not_in_pair"] == 3
    equal = batch([group[1], group[4]], step)
    assert (equal.sequences, counts(equal)) == ([], {"zero_variance": 2})
    assert counts(batch(group[:1], step)) == {"zero_variance": 1}


def test_a_pair_is_made_of_what_can_be_trained_on() -> None:
    group = [
        rollout("cut", 1.0, Ending.LENGTH),
        rollout("forced", 0.9, constrained=True),
        rollout("good", 0.8),
        rollout("bad", 0.1),
    ]
    made = batch(group, StepSettings(method="dpo", mask_constrained=True))
    assert sides(made) == {"good": 1.0, "bad": -1.0}
    assert counts(made) == {"trained": 2, "truncated": 1, "constrained": 1}
    whole = batch(group, StepSettings(method="dpo", mask_truncated=False))
    assert sides(whole) == {"cut": 1.0, "bad": -1.0}


def test_distillation_takes_every_rollout_whatever_its_reward() -> None:
    group = [rollout("a", 0.3), rollout("b", 0.3)]
    made = batch(group, StepSettings(method="distill", teacher="big"))
    assert (sides(made), counts(made)) == ({"a": 1.0, "b": 1.0}, {"trained": 2})


@pytest.mark.parametrize(("method", "kept"), [("grpo", 0), ("sft", 2), ("dpo", 2), ("distill", 0)])
def test_only_methods_that_need_the_policys_own_tokens_drop_old_ones(method: Method, kept: int) -> None:
    group = [rollout("a", 0.0, policy_step=0), rollout("b", 1.0, policy_step=0)]
    teacher = "big" if method == "distill" else None
    made = batch(group, StepSettings(method=method, teacher=teacher))
    assert counts(made) == ({"trained": 2} if kept else {"stale": 2})
    assert made.metrics.get("staleness/max") == (None if kept else 5)


@pytest.mark.parametrize("method", get_args(Method))
def test_demonstrations_teach_by_sft_and_dpo_only(method: Method) -> None:
    given = {"source": "demonstration", "logprobs": [0.0, 0.0], "run": None, "policy_step": 0}
    group = [rollout("a", 0.0, **given), rollout("b", 1.0, **given)]
    step = StepSettings(method=method, teacher="big" if method == "distill" else None)
    if method in ("grpo", "distill"):
        with pytest.raises(InvalidRequest, match=f"call-a of rollout a is a demonstration.*{method}"):
            batch(group, step)
        return
    made = batch(group, step)
    assert counts(made) == {"trained": 2}
    assert all(s.constrained[s.mask].all() for s in made.sequences), "nothing was sampled: no mismatch"


@pytest.mark.parametrize("method", get_args(Method))
def test_tokens_are_scored_at_their_temperature_by_grpo_alone(method: Method) -> None:
    group = [rollout("a", 0.0, sampling={"temperature": 0.5, "top_p": 0.9}), rollout("b", 1.0)]
    made = batch(group, StepSettings(method=method, teacher="big" if method == "distill" else None))
    of = {s.rollout_id: s for s in made.sequences}
    assert of["a"].temperatures[-1] == (0.5 if method == "grpo" else 1.0)
    assert of["a"].constrained[-1], "narrowed"
    counted = "sampling/top_p_calls" in made.metrics
    assert counted == (method in ("grpo", "distill")), "sampling settings matter where tokens are compared"
    group = [rollout("a", 0.0, sampling={"temperature": 0.5}), rollout("b", 1.0)]
    made = batch(group, StepSettings(method=method, teacher="big" if method == "distill" else None))
    (cold,) = (s for s in made.sequences if s.rollout_id == "a")
    assert cold.constrained[-1] == (method != "grpo"), "its logprobs are those of another temperature"


rewards = st.sampled_from([0.0, 0.5, 1.0])
endings = st.sampled_from([Ending.COMPLETED, Ending.COMPLETED, Ending.LENGTH, Ending.TIMEOUT])
calls = st.lists(
    st.fixed_dictionaries(
        {
            "constrained": st.booleans(),
            "policy_step": st.sampled_from([0, 4, 5]),
            "finish_reason": st.sampled_from(["stop", "length"]),
        }
    ),
    min_size=1,
    max_size=3,
)
groups = st.lists(st.lists(st.tuples(rewards, endings, calls), min_size=1, max_size=5), max_size=4)
steps = st.sampled_from(
    [
        StepSettings(),
        StepSettings(method="sft"),
        StepSettings(method="sft", min_reward=0.5),
        StepSettings(method="dpo"),
        StepSettings(method="distill", teacher="big"),
    ]
)


@settings(max_examples=300, deadline=None)
@given(made=groups, step=steps, mask_truncated=st.booleans(), mask_constrained=st.booleans())
def test_every_rollout_and_call_has_one_fate(
    made: list[list[tuple[float, Ending, list[dict[str, object]]]]],
    step: StepSettings,
    mask_truncated: bool,
    mask_constrained: bool,
) -> None:
    step = replace(step, mask_truncated=mask_truncated, mask_constrained=mask_constrained)
    uploaded = [
        TrajectoryGroup(
            f"g{g}",
            "run",
            [
                Trajectory(
                    f"g{g}-{r}",
                    [call(f"g{g}-{r}-{c}", **fields) for c, fields in enumerate(own)],
                    reward,
                    ending,
                )
                for r, (reward, ending, own) in enumerate(rollouts)
            ],
        )
        for g, rollouts in enumerate(made)
    ]
    batch = build_batch(uploaded, read, step, 5)
    figures = {name.removeprefix("account/"): value for name, value in batch.metrics.items()}
    fates = ("trained", *REASONS)
    assert sum(figures.get(fate, 0) for fate in fates) == figures["trajectories"]
    assert sum(figures.get(f"calls_{fate}", 0) for fate in fates) == figures["calls"]
    assert len({s.rollout_id for s in batch.sequences}) == figures["trained"]
    if step.method == "dpo":
        order = list(dict.fromkeys((s.rollout_id, s.advantages.sum() > 0) for s in batch.sequences))
        assert [side for _, side in order] == [True, False] * (len(order) // 2)
