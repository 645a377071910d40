"""ShownRollout: a stored rollout with the text of its tokens, as `insitu trajectories show` presents it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from insitu.errors import InsituError
from insitu.gateway_client import GatewayClient
from insitu.harness.rollouts.step_rewards import trained_step_rewards
from insitu.harness.screen.run_reader import Found, RunReader
from insitu.wire.transport import RetryPolicy

Json = dict[str, Any]
_SECONDS = 5.0
_TEXTS = ("output_pieces", "prompt_text")


@dataclass(frozen=True, slots=True)
class ShownRollout:
    """Everything about one rollout."""

    run_id: str
    store: str
    record: Json
    """As stored, with complete calls; with `output_pieces` and `prompt_text` where the gateway knows them."""
    group_rewards: Sequence[tuple[int, float | None]]
    """Generation and reward of all rollouts of the example."""
    left_out: Mapping[str, str] | None
    """Why rollouts of the epoch were not selected; None for validations and before selection."""
    texts_from: str
    """The source of the tokens' texts, or the reason why there are none."""

    @property
    def has_texts(self) -> bool:
        """True if the tokens of any call have texts."""
        return any(call.get("output_pieces") is not None for call in self.record["calls"])

    @property
    def selected(self) -> str:
        """The rollout's selection for training, in words."""
        if self.left_out is None:
            return "not decided, or no rollout of an epoch"
        reason = self.left_out.get(str(self.record["rollout_id"]))
        return "selected" if reason is None else f"left out: {reason.replace('_', '-')}"

    def kind(self, call: Mapping[str, Any]) -> str | None:
        """Return why a call is not trained on, or None if it is."""
        if call["id"] in self.record.get("call_ids", ()):
            return None
        left_out: dict[str, str] = self.record.get("left_out") or {}
        return left_out.get(call["id"], "not selected")

    def step_reward(self, call: Mapping[str, Any]) -> float | None:
        """Return the call's own reward beyond the rollout's; None without step rewards."""
        rewards = trained_step_rewards(self.record)
        if rewards is None or self.kind(call) is not None:
            return None
        return rewards[list(self.record["call_ids"]).index(call["id"])]

    def to_json(self) -> Json:
        """Return everything as plain values."""
        calls = [{**call, "left_out_as": self.kind(call)} for call in self.record["calls"]]
        group = [{"generation": number, "reward": reward} for number, reward in self.group_rewards]
        return {
            "run_id": self.run_id,
            "store": self.store,
            **self.record,
            "calls": calls,
            "group": group,
            "selected": self.selected,
            "texts_from": self.texts_from,
        }


async def load_rollout(reader: RunReader, found: Found) -> ShownRollout:
    """Load a rollout from its file, and the texts of its tokens from the gateway if it is reachable."""
    record = reader.read(found)
    texts, texts_from = await _texts(reader, found.entry.rollout_id)
    calls = [{**call, **texts.get(call["id"], {})} for call in record["calls"]]
    group = [(entry.generation, entry.reward) for entry in reader.group(found)]
    left_out = reader.left_out(found.store)
    return ShownRollout(reader.run_id, found.store, {**record, "calls": calls}, group, left_out, texts_from)


async def _texts(reader: RunReader, rollout_id: str) -> tuple[dict[str, Json], str]:
    gateway = reader.gateway()
    if gateway is None:
        return {}, "nowhere: the run's configuration names no gateway"
    url, key = gateway
    try:
        async with (
            asyncio.timeout(_SECONDS),
            GatewayClient(url, key, retry=RetryPolicy(max_attempts=1), request_seconds=_SECONDS) as client,
        ):
            record = await client.rollout_record(rollout_id, tokens=False, pieces=True)
    except InsituError as error:
        return {}, f"nowhere: {error.message}"
    except TimeoutError:
        return {}, f"nowhere: the gateway at {url} did not answer within {_SECONDS:.0f} s"
    texts = {call["id"]: {name: call.get(name) for name in _TEXTS} for call in record.calls}
    if not texts:
        return {}, f"nowhere: the gateway at {url} has no record of this rollout"
    if all(each["output_pieces"] is None for each in texts.values()):
        return {}, f"nowhere: the gateway at {url} does not know the tokenizer of these calls' models"
    return texts, f"the gateway at {url}"
