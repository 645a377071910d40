"""The typed client of the gateway's own routes. For model calls, use any OpenAI client instead."""

from __future__ import annotations

import logging
from collections.abc import Callable
from urllib.parse import quote

from insitu.wire.answers import Continued, DemonstrationReceipt
from insitu.wire.bodies import ContinuedIds, Demonstration
from insitu.wire.gateway_state import GatewayHealth, ModelList
from insitu.wire.listed_calls import RolloutRecord as RolloutRecord
from insitu.wire.listed_calls import Whole
from insitu.wire.transport import Connected, RetryPolicy, Transport

log = logging.getLogger(__name__)


class GatewayClient(Connected):
    """Talks to one gateway. Use it as `async with GatewayClient(url, key) as gateway`."""

    def __init__(
        self,
        gateway_url: str,
        api_key: str,
        *,
        retry: RetryPolicy | None = None,
        request_seconds: float = 60.0,
        say: Callable[[str], None] = log.warning,
    ) -> None:
        """`retry` may let requests outlive an outage of the gateway, which `say` is then told about."""
        # No limit on connections: a finished rollout must not queue behind thousands of others.
        super().__init__(
            Transport(
                gateway_url,
                api_key,
                retry=retry,
                request_seconds=request_seconds,
                max_connections=0,
                say=say,
            )
        )

    @property
    def num_outages(self) -> int:
        """Outages of the gateway that were waited for and are over."""
        return self._transport.num_outages

    async def health(self) -> GatewayHealth:
        """Return whether calls would be served now, and by which replicas."""
        return await self._transport.call(GatewayHealth, "GET", "/health")

    async def models(self) -> list[str]:
        """Return the names that calls may use now: the base model, runs and their served steps."""
        return [card.id for card in (await self._transport.call(ModelList, "GET", "/v1/models")).data]

    async def rollout_calls(self, rollout_id: str, *, tokens: bool = True) -> list[Whole]:
        """Return the calls of a rollout in the order in which they ended, including every answered one.

        Each is a `ListedCall`: it has the fields of `ModelCall`, `num_prompt_tokens` and `num_output_tokens`,
        but omits what its parent holds: `insitu.wire.listed_calls.expand` fills that in. Without `tokens`
        they have no `prompt_ids`, `output_ids` and `logprobs`.
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
        return await self._transport.call(RolloutRecord, "GET", path)

    async def continue_ids(self, rollout_id: str, asked: ContinuedIds) -> Continued:
        """Sample continuations of token ids as calls of a rollout; the record holds their tokens.

        Use it with `retry=ONCE`: a request that is sent twice is sampled twice.
        """
        path = f"/rollouts/{quote(rollout_id, safe='')}/v1/completions"
        return await self._transport.call(Continued, "POST", path, body=asked)

    async def demonstrate(self, rollout_id: str, demonstration: Demonstration) -> DemonstrationReceipt:
        """Record the answers of a conversation as calls of a rollout, rendered by the engine's template."""
        path = f"/rollouts/{quote(rollout_id, safe='')}/v1/demonstrations"
        return await self._transport.call(DemonstrationReceipt, "POST", path, body=demonstration)
