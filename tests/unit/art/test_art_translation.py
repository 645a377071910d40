"""Choices are found among the recorded calls, or refused; nothing else ever becomes training data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from insitu.backend.art.matching import CallIndex
from insitu.backend.art.settings import registration, step_settings
from insitu.backend.art.translation import translate
from insitu.errors import CannotHonour, InvalidRequest
from insitu.types import Ending, LoraSettings, ModelCall, StepSettings
from insitu.wire.art import ArtGroup, ArtModel, TrainBody

ASKED = [{"role": "user", "content": "3 + 5?"}]


def call(
    call_id: str, text: str = "8", logprobs: tuple[float, ...] = (-0.1, -0.2), **changes: Any
) -> ModelCall:
    made = ModelCall(call_id, None, "run", "run", 0, "v", [1, 2], [3] * len(logprobs), list(logprobs), "stop")
    answer = {"role": "assistant", "content": text}
    return replace(made, messages=ASKED, answer=answer, **changes)


def choice(
    text: str = "8", logprobs: tuple[float, ...] | None = (-0.1, -0.2), **message: Any
) -> dict[str, Any]:
    content = None if logprobs is None else {"content": [{"token": "?", "logprob": p} for p in logprobs]}
    said = {"role": "assistant", "content": text, "refusal": None, **message}
    return {"index": 0, "finish_reason": "stop", "logprobs": content, "message": said}


def group(*trajectories: tuple[list[dict[str, Any]], float], **fields: Any) -> ArtGroup:
    bodies = [{"messages_and_choices": said, "reward": reward, **fields} for said, reward in trajectories]
    return ArtGroup.model_validate({"trajectories": bodies})


def of(calls: list[ModelCall], *groups: ArtGroup, limit: int | None = None) -> Any:
    return translate("run", groups, CallIndex("run", calls), limit)


def test_a_choice_is_found_by_its_logprobs_in_the_precision_they_are_recorded_in():
    recorded = call("a", logprobs=(-0.1, -0.30000001192092896))
    made = of([call("b", "9"), recorded], group(([*ASKED, choice(logprobs=(-0.1, -0.3))], 1.0)))
    assert made.refused == []
    assert [(t.call_ids, t.reward) for t in made.groups[0].trajectories] == [(["a"], 1.0)]


def test_other_logprobs_or_another_text_are_refused_with_the_reason():
    made = of(
        [call("a")],
        group(([*ASKED, choice(logprobs=(-0.1, -0.25))], 1.0), ([*ASKED, choice("nine")], 0.0)),
    )
    assert made.groups == []
    assert len(made.refused) == 2
    assert "no recorded call of run run has its 2 logprobs and this text: '8'" in made.refused[0]
    assert "'nine'" in made.refused[1]


def test_without_logprobs_conversation_and_words_decide():
    other = replace(call("b"), messages=[{"role": "user", "content": "4 + 4?"}])
    made = of([other, call("a")], group(([*ASKED, choice(logprobs=None)], 1.0)))
    assert made.groups[0].trajectories[0].call_ids == ["a"]
    made = of([other], group(([*ASKED, choice(logprobs=None)], 1.0)))
    assert "conversation and answer" in made.refused[0]


def test_equal_answers_of_two_rollouts_each_get_a_call_of_their_own():
    same = [*ASKED, choice()]
    made = of([call("a"), call("b")], group((same, 1.0), (same, 0.0), (same, 0.5)))
    assert sorted(t.call_ids[0] for t in made.groups[0].trajectories) == ["a", "b"]
    assert "is in another trajectory, or was trained on already" in made.refused[0]


def test_of_equal_calls_the_newest_is_meant():
    made = of([call("old"), call("new")], group(([*ASKED, choice()], 1.0)))
    assert made.groups[0].trajectories[0].call_ids == ["new"]


def test_a_conversation_of_two_turns_keeps_the_order_of_its_calls():
    first = call("a", "wait")
    more = [*ASKED, {"role": "assistant", "content": "wait"}, {"role": "user", "content": "so?"}]
    second = replace(call("b", "wait"), messages=more)
    said = [*ASKED, choice("wait"), {"role": "user", "content": "so?"}, choice("wait")]
    made = of([second, first], group((said, 1.0)))
    assert made.groups[0].trajectories[0].call_ids == ["a", "b"]


def test_further_histories_belong_to_the_same_rollout():
    helper = [{"messages_and_choices": [{"role": "user", "content": "help"}, choice("x", (-3.0,))]}]
    given = group(([*ASKED, choice()], 1.0), additional_histories=helper)
    made = of([call("a"), call("h", "x", (-3.0,))], given)
    assert made.groups[0].trajectories[0].call_ids == ["a", "h"]


def test_messages_alone_partial_calls_and_long_ones_are_refused():
    partial = call("p", "cut", finish_reason="cancelled")
    made = of(
        [partial, call("a")],
        group((ASKED, 1.0), ([*ASKED, choice("cut")], 1.0), ([*ASKED, choice()], 1.0)),
        limit=3,
    )
    assert made.groups == []
    assert ["only messages" in made.refused[0], "'cut'" in made.refused[1]] == [True, True]
    assert made.refused[2] == "it has a sequence of 4 tokens, over max_seq_length 3"


def test_a_rollout_that_the_token_limit_cut_is_known_as_such_whatever_the_client_says():
    made = of([call("a", finish_reason="length")], group(([*ASKED, choice()], 1.0)))
    assert made.groups[0].trajectories[0].ending is Ending.LENGTH


def test_the_same_request_has_the_same_ids_and_another_reward_other_ones():
    once, again, other = (of([call("a")], group(([*ASKED, choice()], r))) for r in (1.0, 1.0, 0.5))
    assert (once.id, once.groups[0].id) == (again.id, again.groups[0].id)
    assert once.groups[0].id != other.groups[0].id


def test_tool_calls_that_a_client_dropped_are_told_apart_by_what_the_next_call_heard():
    def rollout(name: str, question: str) -> list[ModelCall]:
        asked = {"role": "user", "content": question}
        used = {"id": f"id-{name}", "type": "function", "function": {"name": "add", "arguments": "{}"}}
        called = {"role": "assistant", "content": None, "tool_calls": [used]}
        result = {"role": "tool", "tool_call_id": f"id-{name}", "content": "8"}
        first = replace(call(f"{name}-1"), messages=[asked], answer=called)
        return [first, replace(call(f"{name}-2", "eight"), messages=[asked, called, result])]

    one, two, three = rollout("one", "3 + 5?"), rollout("two", "3 + 5?"), rollout("three", "4 + 4?")
    calls = [one[0], two[0], three[0], three[1], two[1], one[1]]
    flat = [choice(""), {"role": "assistant", "content": "8"}, choice("eight")]
    made = of(calls, group(*[([{"role": "user", "content": q}, *flat], 1.0) for q in ("3 + 5?", "4 + 4?")]))
    found = [t.call_ids for t in made.groups[0].trajectories]
    assert found == [["one-1", "one-2"], ["three-1", "three-2"]]


def test_settings_of_the_model_win_over_the_clients_constants_and_unknown_ones_are_refused():
    model = {"name": "run", "base_model": "m", "_internal_config": {"trainer_args": {"learning_rate": 1e-3}}}
    groups = [{"trajectories": [{"messages_and_choices": ASKED}]}]
    body = {"model": model, "trajectory_groups": groups, "config": {"learning_rate": 5e-5}}
    assert step_settings(TrainBody.model_validate(body)) == StepSettings(
        learning_rate=1e-3, mask_truncated=False
    )
    strange = TrainBody.model_validate(body | {"dev_config": {"plot_tensors": False, "kimi_k2_tau": 0.5}})
    with pytest.raises(CannotHonour, match="dev_config: kimi_k2_tau cannot be honoured"):
        step_settings(strange)
    harmless = TrainBody.model_validate(body | {"config": {"learning_rate": 5e-5, "kl_penalty_coef": 0.0}})
    assert step_settings(harmless).beta == 0


def test_words_of_the_client_ask_for_losses_and_advantages_that_there_are():
    def asked(**words: object) -> StepSettings:
        groups = [{"trajectories": []}]
        body = {"model": {"name": "run"}, "trajectory_groups": groups, "dev_config": words}
        return step_settings(TrainBody.model_validate(body))

    assert asked(loss_fn="cispo", normalize_advantages=True, save_checkpoint=False).loss == "cispo"
    assert asked(scale_rewards=False, importance_sampling_level="token").advantage == "mean"
    assert asked(importance_sampling_level="sequence", loss_fn_config=None).loss == "gspo"
    for wrong, said in (
        ({"loss_fn": "dro"}, "loss_fn: 'dro' cannot be honoured here"),
        ({"loss_fn": ["ppo"]}, "cannot be honoured"),
        ({"ppo": True, "loss_fn": "cispo"}, "contradicts"),
    ):
        with pytest.raises(CannotHonour, match=said):
            asked(**wrong)


def test_settings_under_our_own_names_are_checked_as_the_api_checks_them():
    groups = [{"trajectories": []}]
    body = {"model": {"name": "run"}, "trajectory_groups": groups, "insitu": {"num_passes": 2}}
    assert step_settings(TrainBody.model_validate(body)).num_passes == 2
    with pytest.raises(InvalidRequest, match="num_passes: Input should be"):
        step_settings(TrainBody.model_validate(body | {"insitu": {"num_passes": 0}}))


def test_the_registration_of_a_model():
    internal = {"peft_args": {"r": 4}, "init_args": {"max_seq_length": 512}, "engine_args": None}
    model = ArtModel.model_validate(
        {"name": "n", "project": "p", "base_model": "m", "_internal_config": internal}
    )
    body = registration(model)
    assert (body.project, body.name, body.base_model, body.lora.rank) == ("p", "n", "m", 4)
    assert body.init_args == {"max_seq_length": 512}
    assert registration(model.model_copy(update={"internal": None})).lora.rank == LoraSettings().rank
    elsewhere = ArtModel.model_validate({"name": "n", "_internal_config": {"trainer_gpu_ids": [1]}})
    with pytest.raises(CannotHonour, match="_internal_config: trainer_gpu_ids cannot be honoured"):
        registration(elsewhere)
