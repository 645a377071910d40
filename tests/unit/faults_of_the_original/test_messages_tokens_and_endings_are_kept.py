"""Faults 7 to 10 of the original harness: what becomes of messages, tokens and endings."""

from __future__ import annotations

import asyncio
from typing import Any

from insitu.backend.batch import make_batch
from insitu.harness.rollouts.episode import EpisodeItemRole
from insitu.types import StepSettings
from tests.support.finetune_bench import (
    FinetuneBench,
    agent,
    ask,
    by_generation,
    one_call,
    open_bench,
    position,
    rewards,
)
from tests.support.standin_engine import Behaviour

LOOK = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
}


async def uses_a_tool(value: Any, context: Any) -> str:
    """Sends back what people send back: role, content and tool calls, without the empty fields."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"look for {value}"}]
    answer = (await ask(context.llm(), messages, tools=[LOOK]))["message"]
    calls = answer["tool_calls"]
    messages.append({"role": "assistant", "tool_calls": calls})
    messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": f"found {value}"})
    messages.append((await ask(context.llm(), messages))["message"])
    messages.append({"role": "user", "content": "go on"})
    return (await ask(context.llm(), messages))["message"]["content"]


async def test_fault_07_tools_stay_tools(tmp_path, monkeypatch):
    """The original turns tool results into assistant messages and drops tool calls and tool schemas."""
    async with open_bench(tmp_path, monkeypatch, Behaviour(parser=True), num_examples=1) as bench:
        bench.project.configure(
            workflow=agent(uses_a_tool), eval=rewards(by_generation), finetuning={"num_epochs": 1}
        )
        assert (await bench.run()).outcome == "succeeded"
        with bench.store() as store:
            trajectory = store.rollouts()[0]
        first, second, third = trajectory.read_calls()
        assert first["tools"] == [LOOK]
        assert first["answer"]["tool_calls"][0]["function"]["name"] == "look"
        assert [message["role"] for message in second["messages"]] == ["user", "assistant", "tool"]
        assert [message["role"] for message in third["messages"]][3:] == ["assistant", "user"]
        role = EpisodeItemRole
        items = trajectory.episode
        # Every message once, each in its own role.
        told = [role.USER, role.ASSISTANT, role.TOOL, role.ASSISTANT, role.USER, role.ASSISTANT]
        assert [item.role for item in items] == told
        assert items[1].metadata["tool_calls"] == first["answer"]["tool_calls"]
        assert items[2].content == "found question 0"
        assert items[2].metadata["tool_call_id"] == items[1].metadata["tool_calls"][0]["id"]
        assert [len(item.logprobs or []) for item in items if item.role is role.ASSISTANT] == [4, 4, 4]


async def talks_in_every_way(value: Any, context: Any) -> str:
    """Six calls; `SENT` keeps what each of them sent."""
    llm, sent = context.llm(), SENT.setdefault(context.rollout_id, [])

    async def say(*messages: dict[str, Any]) -> dict[str, Any]:
        sent.append(list(messages))
        return (await ask(llm, list(messages)))["message"]

    again = {"role": "user", "content": "again"}
    first = await say({"role": "system", "content": "one"}, again)
    await say({"role": "system", "content": "one"}, again, first, again)  # the same text twice
    await say({"role": "system", "content": "two"}, again)  # another system prompt
    await asyncio.gather(say(again), say(again))  # side by side, word for word the same
    parts = [{"type": "text", "text": "a part"}, {"type": "text", "text": " and another"}]
    await say({"role": "user", "content": parts}, {"role": "assistant", "content": "rewritten"}, again)
    return str(value)


SENT: dict[str, list[list[dict[str, Any]]]] = {}


async def test_fault_08_every_call_is_trained_on(tmp_path, monkeypatch):
    """The original keeps one flat conversation an example: each of these loses the episode or raises."""
    SENT.clear()
    async with open_bench(tmp_path, monkeypatch, num_examples=2) as bench:
        bench.project.configure(
            workflow=agent(talks_in_every_way), eval=rewards(by_generation), finetuning={"num_epochs": 1}
        )
        summary = await bench.run()
        assert summary.outcome == "succeeded", summary.reason
        records = {record["rollout_id"]: record for record in bench.records()}
        assert len(records) == 8
        for rollout_id, record in records.items():
            kept = [call["messages"] for call in record["calls"]]
            assert len(kept) == 6
            assert sorted(map(str, kept)) == sorted(map(str, SENT[rollout_id]))
            assert record["call_ids"] == [call["id"] for call in record["calls"]]
        uploaded = {t.rollout_id: t for group in bench.trained_groups() for t in group.trajectories}
        assert {key: t.call_ids for key, t in uploaded.items()} == {
            key: record["call_ids"] for key, record in records.items()
        }
        # The second call goes on where the first ended; the five others stand for themselves.
        with bench.store() as store:
            items = store.rollouts()[0].episode
        assert sum(item.metadata.get("sampled", False) for item in items) == 6
        assert len(items) == (2 + 1 + 1 + 1) + (2 + 1) + 2 * (1 + 1) + (3 + 1)


def sampled_tokens(bench: FinetuneBench) -> dict[str, list[list[int]]]:
    """By rollout, the sampled tokens of every sequence that a step would train on."""
    batch = make_batch(bench.trained_groups(), bench.backend._records, StepSettings(), 0)
    found: dict[str, list[list[int]]] = {}
    for sequence in batch.sequences:
        ids = sequence.token_ids[sequence.mask].tolist()
        found.setdefault(sequence.rollout_id, []).append(ids)
    return found


async def two_turns(value: Any, context: Any) -> str:
    messages = [{"role": "user", "content": str(value)}]
    messages.append((await ask(context.llm(), messages))["message"])
    messages.append({"role": "user", "content": "and?"})
    return (await ask(context.llm(), messages))["message"]["content"]


async def test_fault_09_the_sampled_tokens_are_the_trained_ones(tmp_path, monkeypatch):
    """The original never captures token ids; its backend renders the chat again."""
    behaviour = Behaviour(texts=["short", "a longer answer", "ünïcödé"])
    async with open_bench(tmp_path, monkeypatch, behaviour) as bench:
        bench.backend.engine._keep_seen = True
        bench.project.configure(
            workflow=agent(two_turns), eval=rewards(by_generation), finetuning={"num_epochs": 1}
        )
        assert (await bench.run()).outcome == "succeeded"
        sent = [body["token_ids"] for body in bench.backend.engine.calls_to("/inference/v1/generate")]
        trained = sampled_tokens(bench)
        records = bench.records()
        assert len(records) == len(trained) == 12
        for record in records:
            recorded = bench.backend._records.get(record["call_ids"])
            assert len(recorded) == 2
            for call, known in zip(record["calls"], recorded, strict=True):
                assert call["prompt_ids"] == known.prompt_ids
                assert call["prompt_ids"] in sent
                assert call["output_ids"] == known.output_ids
                assert call["logprobs"] == known.logprobs
                text = "".join(chr(token - 100_000) for token in call["output_ids"])
                assert text == call["answer"]["content"]
            outputs = [token for call in record["calls"] for token in call["output_ids"]]
            assert [token for ids in trained[record["rollout_id"]] for token in ids] == outputs


def long_for_odd(messages: list[dict[str, str]]) -> str:
    return "this is far too long" if int(messages[-1]["content"].split()[-1]) % 2 else "ok"


async def test_fault_10_a_cut_answer_is_known_as_cut(tmp_path, monkeypatch):
    """The original says finish_reason `stop` whatever happened."""
    async with open_bench(tmp_path, monkeypatch, Behaviour(answers=long_for_odd), num_examples=4) as bench:
        bench.project.configure(
            llms={"policy": {"max_tokens": 6}},
            workflow=agent(one_call),
            eval=rewards(by_generation),
            finetuning={"num_epochs": 1},
        )
        assert (await bench.run()).outcome == "succeeded"
        for record in bench.records():
            cut = record["index"] % 2 == 1
            assert record["ending"] == ("length" if cut else "completed")
            assert record["calls"][0]["finish_reason"] == ("length" if cut else "stop")
            assert record["output"] == ("this i" if cut else "ok")
            assert record["reward"] == by_generation_of(record["rollout_id"])
        (line,) = bench.epochs()
        assert line["account"]["dropped"] == {"truncated": 8}
        assert line["account"]["line"].startswith("trained 8/16: 8 truncated; calls ")
        endings = {str(t.ending) for group in bench.trained_groups() for t in group.trajectories}
        assert endings == {"completed", "length"}


def by_generation_of(rollout_id: str) -> float:
    index, generation = position(rollout_id)
    return (index + 1) * (generation + 1) / 100


async def test_fault_10_every_rollout_knows_its_weights(tmp_path, monkeypatch):
    """The original knows no policy version: how stale a rollout is cannot be told."""
    async with open_bench(tmp_path, monkeypatch) as bench:
        bench.project.configure(
            workflow=agent(one_call), eval=rewards(by_generation), finetuning={"num_epochs": 3}
        )
        assert (await bench.run()).outcome == "succeeded"
        for epoch, version in enumerate(("base", "small@1", "small@2")):
            for record in bench.records(f"epoch-{epoch:04d}"):
                assert record["metadata"]["policy_steps"] == [epoch]
                assert [call["policy_version"] for call in record["calls"]] == [version]
