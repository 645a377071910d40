"""The typed client of the gateway's own routes. Model calls go there with any OpenAI client instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote

from insitu.answers import Json
from insitu.transport import Connected, RetryPolicy, Transport


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """What the gateway knows of one rollout."""

    calls: list[Json]
    """As `GatewayClient.rollout_calls` gives them."""
    seen: int | None
    """Calls that named the rollout, counted as they came in (a request for `n` choices counts `n`); None when
    the gateway has no whole count."""
    unrecorded: Mapping[str, int] = field(default_factory=dict[str, int])
    """Calls that ended without a record, by reason: `refused`, `failed`, or `cancelled` before they began."""
    under_way: int = 0
    """Calls that have not ended."""


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
        # No limit on connections: one that finished must not wait behind thousands that have.
        super().__init__(
            Transport(gateway_url, api_key, retry=retry, request_seconds=request_seconds, max_connections=0)
        )

    async def health(self) -> Json:
        """Whether calls would be served now, and by which replicas."""
        return await self._transport.call("GET", "/health")

    async def models(self) -> list[str]:
        """The names that calls may use now: the base model, runs and their served steps."""
        return [card["id"] for card in (await self._transport.call("GET", "/v1/models"))["data"]]

    async def rollout_calls(self, rollout_id: str, *, tokens: bool = True) -> list[Json]:
        """The calls of a rollout in the order in which they ended, every answered one among them.

        Each has the fields of `ModelCall`, `num_prompt_tokens` and `num_output_tokens`, and leaves out what
        its parent holds: `insitu.recorded.expand` makes them whole. Without `tokens` they have no
        `prompt_ids`, `output_ids` and `logprobs`.
        """
        return (await self.rollout_record(rollout_id, tokens=tokens)).calls

    async def rollout_record(
        self, rollout_id: str, *, tokens: bool = True, pieces: bool = False
    ) -> RolloutRecord:
        """The calls of a rollout, and how many there should be.

        With `pieces` each has `output_pieces` (the text of every output token) and `prompt_text` (of the
        part of the prompt that is its own), for display; None when the tokenizer is not known.
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
