"""ShownRollout: a stored rollout with the text of its tokens, as `insitu trajectories show` presents it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from insitu.errors import InsituError
from insitu.gateway_client import GatewayClient
from insitu.harness.files.rollout_line import to_line
from insitu.harness.rollouts.recorded_call import RecordedCall, complete, recorded_calls
from insitu.harness.rollouts.rollout import Rollout, RolloutDetails
from insitu.harness.screen.run_reader import Found, RunReader
from insitu.wire.transport import RetryPolicy

_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ShownRollout:
    """Everything about one rollout."""

    run_id: str
    store: str
    rollout: Rollout
    details: RolloutDetails
    """With complete calls; with `output_pieces` and `prompt_text` where the gateway knows them."""
    group: Sequence[Rollout]
    """All rollouts of the example."""
    dropped: Mapping[str, str] | None
    """Why rollouts of the epoch were dropped; None for validations and before selection."""
    texts_from: str
    """The source of the tokens' texts, or the reason why there are none."""

    @property
    def selected(self) -> str:
        """The rollout's selection for training, in words."""
        if self.dropped is None:
            return "not decided, or no rollout of an epoch"
        reason = self.dropped.get(self.rollout.rollout_id)
        return "selected" if reason is None else f"dropped: {reason.replace('_', '-')}"

    def dropped_as(self, call: RecordedCall) -> str | None:
        """Return why a call is not trained on, or None if it is."""
        if call["id"] in self.rollout.call_ids:
            return None
        return self.details.dropped.get(call["id"], "not selected")

    def call_reward(self, call: RecordedCall) -> float | None:
        """Return the call's own reward beyond the rollout's; None without call rewards."""
        rewards = self.rollout.call_rewards
        if rewards is None or call["id"] not in self.rollout.call_ids:
            return None
        return rewards[self.rollout.call_ids.index(call["id"])]

    def to_json(self) -> dict[str, object]:
        """Return everything as plain values, under the names that scripts know."""
        line = to_line(self.rollout, self.details)
        return {
            "run_id": self.run_id,
            "store": self.store,
            **line,
            "step_rewards": line["call_rewards"],
            "left_out": line["dropped"],
            "calls": [{**call, "left_out_as": self.dropped_as(call)} for call in self.details.calls],
            "group": [{"generation": each.generation, "reward": each.reward} for each in self.group],
            "selected": self.selected,
            "texts_from": self.texts_from,
        }


async def load_rollout(reader: RunReader, found: Found) -> ShownRollout:
    """Load a rollout from its file, and the texts of its tokens from the gateway if it is reachable."""
    rollout = found.rollout
    details = rollout.details(tokens=True)
    texts, texts_from = await _texts(reader, rollout.rollout_id)
    calls = [_with_texts(call, texts.get(call["id"])) for call in complete(details.calls)]
    return ShownRollout(
        reader.run_id,
        found.store,
        rollout,
        replace(details, calls=calls),
        reader.group(found),
        reader.dropped(found.store),
        texts_from,
    )


def _with_texts(call: RecordedCall, listed: RecordedCall | None) -> RecordedCall:
    if listed is None:
        return call
    texts = {"output_pieces": listed.get("output_pieces"), "prompt_text": listed.get("prompt_text")}
    return cast(RecordedCall, {**call, **texts})


async def _texts(reader: RunReader, rollout_id: str) -> tuple[dict[str, RecordedCall], str]:
    """Return the gateway's calls with their texts, by id, and where they are from."""
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
    calls = {call["id"]: call for call in recorded_calls(record.calls)}
    if not calls:
        return {}, f"nowhere: the gateway at {url} has no record of this rollout"
    if all(call.get("output_pieces") is None for call in calls.values()):
        return {}, f"nowhere: the gateway at {url} does not know the tokenizer of these calls' models"
    return calls, f"the gateway at {url}"
