"""The typed client of the gateway's own routes. For model calls, use any OpenAI client instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote

from insitu.answers import Json
from insitu.transport import Connected, RetryPolicy, Transport


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """The gateway's record of one rollout."""

    calls: list[Json]
    """As returned by `GatewayClient.rollout_calls`."""
    seen: int | None
    """Calls that named the rollout, counted as they came in (a request for `n` choices counts `n`); None if
    the gateway's count is incomplete."""
    unrecorded: Mapping[str, int] = field(default_factory=dict[str, int])
    """Calls that ended without a record, by reason: `refused`, `failed`, or `cancelled` before they began."""
    under_way: int = 0
    """Calls still in progress."""


class GatewayClient(Connected):
    """Talks to one gateway. Use it as `async with GatewayClient(url, key) as gateway`."""

    def __init__(
        self,
        gateway_url: str,
        api_key: str,
        *,
        retry: RetryPolicy | None = None,
        request_seconds: float = 60.0,
    ) -> None:
        # No limit on connections: a finished rollout must not queue behind thousands of others.
        super().__init__(
            Transport(gateway_url, api_key, retry=retry, request_seconds=request_seconds, max_connections=0)
        )

    async def health(self) -> Json:
        """Return whether calls would be served now, and by which replicas."""
        return await self._transport.call("GET", "/health")

    async def models(self) -> list[str]:
        """Return the names that calls may use now: the base model, runs and their served steps."""
        return [card["id"] for card in (await self._transport.call("GET", "/v1/models"))["data"]]

    async def rollout_calls(self, rollout_id: str, *, tokens: bool = True) -> list[Json]:
        """Return the calls of a rollout in the order in which they ended, including every answered one.

        Each has the fields of `ModelCall`, `num_prompt_tokens` and `num_output_tokens`, but omits what its
        parent holds: `insitu.recorded.expand` fills that in. Without `tokens` they have no `prompt_ids`,
        `output_ids` and `logprobs`.
        """
        return (await self.rollout_record(rollout_id, tokens=tokens)).calls

    async def rollout_record(
        self, rollout_id: str, *, tokens: bool = True, pieces: bool = False
    ) -> RolloutRecord:
        """Return the calls of a rollout, and how many there should be.

        With `pieces` each call has `output_pieces` (the text of every output token) and `prompt_text` (the
        text of its own part of the prompt), for display; both are None if the tokenizer is not known.
        """
        path = f"/rollouts/{quote(rollout_id, safe='')}/calls?tokens={'true' if tokens else 'false'}"
        path += "&pieces=true" if pieces else ""
        answer = await self._transport.call("GET", path)
        return RolloutRecord(
            answer["calls"],
            answer.get("seen"),
            answer.get("unrecorded") or {},
            answer.get("under_way") or 0,
        )
