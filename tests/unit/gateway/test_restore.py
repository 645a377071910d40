"""Ids sampled in earlier turns go back into the prompt that continues them, and nothing else does."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

import pytest

from insitu.types import ModelCall, TrainingSequence
from tests.support.sequences import join
from tests.unit.gateway.conftest import API, GatewayUnderTest, StartGateway
from tests.unit.gateway.drifting_engine import (
    CALL,
    END,
    FIRST_HALF,
    IDS,
    SECOND_HALF,
    DriftingEngine,
    template,
    tokenize,
    write_tokenizer,
)

pytestmark = pytest.mark.timeout(30)
GENERATE = "/inference/v1/generate"
ASK = {"role": "user", "content": "ab"}


def joined(calls: list[ModelCall]) -> tuple[list[TrainingSequence], int]:
    """The training sequences of a rollout and its prefix breaks."""
    return join(calls, "ro-1", [1.0] * len(calls))


def ids(*texts: str) -> list[int]:
    """Tokens by their text, one each; `<|end|>` ends."""
    return [END if text == "<|end|>" else IDS[text] for text in texts]


class Talk:
    """A conversation through the gateway, turn by turn."""

    def __init__(self, gateway: GatewayUnderTest, rollout: str = "ro-1", **options: Any) -> None:
        self.gateway, self.rollout, self.options = gateway, rollout, options
        self.messages: list[dict[str, Any]] = []

    async def turn(self, said: str, *outputs: list[int], status: int = 200) -> list[int]:
        """Say something, let the engine sample; returns the ids of the prompt that it got."""
        engine = cast(DriftingEngine, self.gateway.engine)
        engine.outputs += outputs
        self.messages.append({"role": "user", "content": said})
        path = f"/rollouts/{self.rollout}/v1/chat/completions"
        got, body, _ = await self.gateway.post(path, messages=self.messages, **self.options)
        assert got == status, body
        self.messages.append(body["choices"][0]["message"])
        return engine.calls_to(GENERATE)[-1]["token_ids"]

    def rendered(self) -> list[int]:
        """What the template makes of the conversation, before its last answer."""
        return tokenize(template(self.messages[:-1]))


async def counts(gateway: GatewayUnderTest) -> dict[str, Any]:
    """The counters that are not zero, as `/health` shows them without a key."""
    async with gateway.session.get(f"{gateway.url}/health") as got:
        report = (await got.json())["put_back"]
    assert report == (await gateway.state())["put_back"]
    return {key: value for key, value in report.items() if value and isinstance(value, int)} | {
        "tokenizers": report["tokenizers"]
    }


@pytest.fixture
async def gateway(start_gateway: StartGateway, tmp_path: Path) -> GatewayUnderTest:
    folder = write_tokenizer(tmp_path / "model")
    return await start_gateway(make_engine=lambda: DriftingEngine(folder))


def outcomes(seen: dict[str, Any]) -> dict[str, int]:
    return {k: v for k, v in seen.items() if k != "tokenizers" and "rollouts" not in k and "tokens" not in k}


async def test_sampled_ids_are_restored(gateway: GatewayUnderTest) -> None:
    talk = Talk(gateway)
    first = await talk.turn("ab", ids("1", "0", "<|end|>"))
    assert talk.messages[-1]["content"] == "10"
    second = await talk.turn("c", ids("a", "b", "<|end|>"))
    assert second == first + ids("1", "0", "<|end|>") + tokenize(
        "\n<|start|>user\nc<|end|>\n<|start|>assistant\n"
    )
    assert second != talk.rendered()
    assert len(second) == len(talk.rendered()) + 1
    third = await talk.turn("c", ids("c", "<|end|>"))
    assert third[: len(second) + 3] == second + ids("a", "b", "<|end|>")
    calls = await gateway.records()
    assert [c.prompt_ids for c in calls] == [first, second, third]
    sequences, breaks = joined(calls)
    assert (len(sequences), breaks, sum(sequences[0].mask)) == (1, 0, 8)
    seen = await counts(gateway)
    assert outcomes(seen) == {"put_back": 2}
    assert seen["tokenizers"] == {"tiny": "ok"}


async def test_usage_counts_and_ids_shown_are_those_of_the_prompt_that_went_in(
    gateway: GatewayUnderTest,
) -> None:
    talk = Talk(gateway)
    await talk.turn("ab", ids("1", "0", "<|end|>"))
    cast(DriftingEngine, gateway.engine).outputs += [ids("c", "<|end|>")]
    messages = [*talk.messages, ASK]
    _, body, _ = await gateway.post(
        "/rollouts/ro-1/v1/chat/completions", messages=messages, return_token_ids=True
    )
    went_in = gateway.engine.calls_to(GENERATE)[-1]["token_ids"]
    assert body["prompt_token_ids"] == went_in
    assert body["usage"]["prompt_tokens"] == len(went_in) == len(tokenize(template(messages))) + 1


async def test_ids_that_continue_exactly_are_left_alone(gateway: GatewayUnderTest) -> None:
    talk = Talk(gateway)
    await talk.turn("ab", ids("10", "<|end|>"))
    assert await talk.turn("c", ids("c", "<|end|>")) == talk.rendered()
    seen = await counts(gateway)
    assert outcomes(seen) == {"exact": 1}
    assert seen["tokenizers"] == {"tiny": "ok"}


@pytest.mark.parametrize(
    "output",
    [
        ids("1", "0", " ", "<|end|>"),  # trimmed by the template
        ids("\n", "1", "0", "<|end|>"),
        [FIRST_HALF, *ids("1", "0", "<|end|>")],  # half a character comes back as U+FFFD
        ids("1", "0", "<", "|", "end", "|>", "<|end|>"),  # a marker spelt out comes back as the marker
        [END, *ids("1", "0", "<|end|>")],  # a marker in the middle does not come back at all
    ],
)
async def test_changed_text_stays_as_the_template_has_it(
    gateway: GatewayUnderTest, output: list[int]
) -> None:
    talk = Talk(gateway)
    await talk.turn("ab", output)
    assert await talk.turn("c", ids("c", "<|end|>")) == talk.rendered()
    assert outcomes(await counts(gateway)) == {"template_changed": 1}
    assert joined(await gateway.records())[1] == 1


async def test_a_history_that_the_agent_rewrote_stays_as_it_is(gateway: GatewayUnderTest) -> None:
    talk = Talk(gateway)
    await talk.turn("ab", ids("1", "0", "<|end|>"))
    await talk.turn("c", ids("a", "b", "<|end|>"))
    talk.messages[3] = {"role": "assistant", "content": "c"}
    prompt = await talk.turn("c", ids("c", "<|end|>"))
    # The first turn is as it was, and keeps its ids; the second is the agent's own.
    assert prompt != talk.rendered()
    assert prompt[-20:] == talk.rendered()[-20:]
    assert outcomes(await counts(gateway)) == {"put_back": 2, "template_changed": 1}
    sequences, breaks = joined(await gateway.records())
    assert (len(sequences), breaks) == (2, 1)


async def test_characters_in_halves_and_added_tokens_spelt_out_are_the_same_text(
    gateway: GatewayUnderTest,
) -> None:
    gateway_ids = [FIRST_HALF, SECOND_HALF, *ids("1", "0", "<|end|>")]
    talk = Talk(gateway)
    first = await talk.turn("ab", gateway_ids)
    assert talk.messages[-1]["content"] == "é10"
    assert (await talk.turn("c", [CALL, *ids("1", "0", "<|end|>")]))[: len(first) + 5] == first + gateway_ids
    await talk.turn("c", ids("c", "<|end|>"))
    assert joined(await gateway.records())[1] == 0


async def test_streams_are_remembered_and_restored(gateway: GatewayUnderTest) -> None:
    engine = cast(DriftingEngine, gateway.engine)
    engine.outputs += [ids("1", "0", "<|end|>"), ids("c", "<|end|>")]
    path = "/rollouts/ro-1/v1/chat/completions"
    _, _, done = await gateway.stream(path, messages=[ASK])
    assert done
    messages = [ASK, {"role": "assistant", "content": "10"}, ASK]
    events, _, done = await gateway.stream(path, messages=messages, stream_options={"include_usage": True})
    assert done
    assert events[-1]["usage"]["prompt_tokens"] == len(tokenize(template(messages))) + 1
    assert joined(await gateway.records())[1] == 0


async def test_conversations_side_by_side_keep_their_own_ids(gateway: GatewayUnderTest) -> None:
    agent, helper, twin = Talk(gateway), Talk(gateway), Talk(gateway)
    await agent.turn("ab", ids("1", "0", "<|end|>"))
    await helper.turn("c", ids("a", "b", "<|end|>"))
    await twin.turn("ab", ids("1", "<|end|>"))  # the same prompt, another answer
    for talk in (agent, helper, twin):
        await talk.turn("a", ids("1", "0", "<|end|>"))
        await talk.turn("b", ids("c", "<|end|>"))
    sequences, breaks = joined(await gateway.records())
    assert (len(sequences), breaks) == (3, 2)
    assert [sum(s.mask) for s in sequences] == [8, 8, 7]
    assert outcomes(await counts(gateway)) == {"put_back": 5, "exact": 1}  # new ones and twins are no breaks


async def test_twins_with_the_same_text_each_continue_one(gateway: GatewayUnderTest) -> None:
    one, two = Talk(gateway), Talk(gateway)
    await one.turn("ab", ids("a", "b", "1", "0", "<|end|>"))
    await two.turn("ab", ids("ab", "1", "0", "<|end|>"))
    await one.turn("a", ids("c", "<|end|>"))
    await two.turn("a", ids("c", "<|end|>"))
    sequences, breaks = joined(await gateway.records())
    assert (len(sequences), breaks) == (2, 1)


async def test_a_conversation_that_went_on_is_not_taken_for_its_younger_twin(
    gateway: GatewayUnderTest,
) -> None:
    one, two = Talk(gateway), Talk(gateway)
    await one.turn("ab", ids("a", "b", "1", "0", "<|end|>"))
    await one.turn("a", ids("c", "<|end|>"))
    await two.turn("ab", ids("ab", "1", "0", "<|end|>"))
    await two.turn("b", ids("c", "<|end|>"))
    sequences, breaks = joined(await gateway.records())
    assert ([sum(s.mask) for s in sequences], breaks) == ([7, 6], 1)


async def test_only_the_same_rollout_and_the_same_run_are_continued(gateway: GatewayUnderTest) -> None:
    talk = Talk(gateway)
    await talk.turn("ab", ids("1", "0", "<|end|>"))
    for other in (Talk(gateway, "ro-2"), Talk(gateway, model="run")):
        other.messages = list(talk.messages)
        assert await other.turn("c", ids("c", "<|end|>")) == other.rendered()
    engine = cast(DriftingEngine, gateway.engine)
    for _ in range(2):  # calls outside any rollout
        engine.outputs += [ids("1", "0", "<|end|>")]
        await gateway.post(messages=[*talk.messages, ASK])
        assert engine.calls_to(GENERATE)[-1]["token_ids"] == tokenize(template([*talk.messages, ASK]))
    assert outcomes(await counts(gateway)) == {}


async def test_plain_completions_continue_text_but_never_ids(gateway: GatewayUnderTest) -> None:
    engine, path = cast(DriftingEngine, gateway.engine), "/rollouts/ro-1/v1/completions"

    async def complete(prompt: str | list[int], output: list[int]) -> list[int]:
        engine.outputs += [output]
        assert (await gateway.post(path, prompt=prompt))[0] == 200
        return engine.calls_to(GENERATE)[-1]["token_ids"]

    await complete("ab", ids("1", "0", "1"))
    assert await complete("ab101c", ids("c")) == ids("ab", "1", "0", "1", "c")
    assert await complete("ab1010", ids("b")) == ids("ab", "10", "10")  # the text ends inside a token
    assert await complete(ids("ab", "10", "1", "c"), ids("c")) == ids("ab", "10", "1", "c")
    assert outcomes(await counts(gateway)) == {"put_back": 1, "boundary": 1}


async def test_ids_are_never_restored_across_media(gateway: GatewayUnderTest) -> None:
    engine = cast(DriftingEngine, gateway.engine)
    talk = Talk(gateway)
    await talk.turn("ab", ids("1", "0", "<|end|>"))
    engine.features = {"mm_hashes": {"image": ["x"]}}
    assert await talk.turn("c", ids("1", "0", "<|end|>")) == talk.rendered()
    engine.features = None
    assert outcomes(await counts(gateway)) == {}


@pytest.mark.parametrize(("spare", "outcome"), [(3, "put_back"), (2, "put_back"), (1, "no_room")])
async def test_the_answer_still_fits_the_model(
    start_gateway: StartGateway, tmp_path: Path, spare: int, outcome: str
) -> None:
    folder = write_tokenizer(tmp_path / "model")
    messages = [ASK, {"role": "assistant", "content": "10"}, ASK]
    length = len(tokenize(template(messages))) + spare
    gateway = await start_gateway(make_engine=lambda: DriftingEngine(folder, length))
    talk = Talk(gateway)
    first = await talk.turn("ab", ids("1", "0", "<|end|>"))
    second = await talk.turn("ab", ids("c"))
    sampling = gateway.engine.calls_to(GENERATE)[-1]["sampling_params"]
    assert len(second) + sampling["max_tokens"] == length
    assert (second[: len(first) + 2] == first + ids("1", "0")) == (outcome == "put_back")
    assert outcomes(await counts(gateway)) == {outcome: 1}


@pytest.mark.parametrize(
    "tokenizer", [None, '{"model": {"vocab": {}}, "decoder": {"type": "WordPiece"}}', "{"]
)
async def test_without_a_tokenizer_it_is_off_and_says_so_once(
    start_gateway: StartGateway, tmp_path: Path, caplog: pytest.LogCaptureFixture, tokenizer: str | None
) -> None:
    if tokenizer is not None:
        (tmp_path / "tokenizer.json").write_text(tokenizer)
    root = None if tokenizer is None else tmp_path
    gateway = await start_gateway(make_engine=lambda: DriftingEngine(root))
    with caplog.at_level(logging.WARNING):
        talk = Talk(gateway)
        await talk.turn("ab", ids("1", "0", "<|end|>"))
        for _ in range(3):
            assert await talk.turn("c", ids("1", "0", "<|end|>")) == talk.rendered()
    said = [r.getMessage() for r in caplog.records if "not restored" in r.getMessage()]
    assert len(said) == 1
    seen = await counts(gateway)
    assert seen["tokenizers"]["tiny"].startswith("off: ")
    assert seen["not_compared"] == 3
    assert "put_back" not in seen


async def test_steps_of_a_run_share_a_conversation_and_adapters_have_the_tokenizer_of_their_base(
    gateway: GatewayUnderTest,
) -> None:
    gateway.engine.behaviour.adapters = ["run@1"]
    served = {step: {"engine_model": model, "version": v} for step, model, v in (("0", "tiny", "base"),)}
    served["1"] = {"engine_model": "run@1", "version": "run@1"}
    talk = Talk(gateway, model="run")
    first = await talk.turn("ab", ids("1", "0", "<|end|>"))
    await gateway.put_table(runs={"run": {"latest": 1, "served": served}})
    assert (await talk.turn("c", ids("c", "<|end|>")))[: len(first) + 2] == first + ids("1", "0")
    assert [c.policy_step for c in await gateway.records()] == [0, 1]
    assert (await counts(gateway))["tokenizers"] == {"tiny": "ok"}


async def test_a_second_attempt_gets_the_same_ids(start_gateway: StartGateway, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model")
    gateway = await start_gateway(2, make_engine=lambda: DriftingEngine(folder))
    engines = cast(list[DriftingEngine], gateway.engines)
    for engine in engines:
        engine.outputs = [ids("1", "0", "<|end|>"), ids("c", "<|end|>")]
    await gateway.post("/rollouts/ro-1/v1/chat/completions", messages=[ASK])
    used = next(e for e in engines if e.calls_to(GENERATE))
    used.behaviour.fault, used.behaviour.fault_count = "503", 1
    messages = [ASK, {"role": "assistant", "content": "10"}, ASK]
    async with gateway.session.post(
        f"{gateway.url}/rollouts/ro-1/v1/chat/completions",
        json={"model": "tiny", "messages": messages},
        headers=API,
    ) as got:
        assert got.status == 200
    assert joined(await gateway.records())[1] == 0
