"""The typed client of the gateway's own routes. For model calls, use any OpenAI client instead."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from urllib.parse import quote

from insitu.types import gateway_of
from insitu.wire.answers import Continued, DemonstrationReceipt
from insitu.wire.bodies import ContinuedIds, Demonstration
from insitu.wire.gateway_state import GatewayHealth, ModelList
from insitu.wire.listed_calls import RolloutRecord as RolloutRecord
from insitu.wire.listed_calls import Whole
from insitu.wire.transport import Connected, RetryPolicy, Transport

log = logging.getLogger(__name__)


class GatewayClient(Connected):
    """Talks to a backend's gateway, or to several. Use it as `async with GatewayClient(url, key) as gateway`.

    Of several gateways, one has all calls of a rollout; requests about the rollout go there.
    """

    def __init__(
        self,
        gateway_url: str | Sequence[str],
        api_key: str,
        *,
        retry: RetryPolicy | None = None,
        request_seconds: float = 60.0,
        say: Callable[[str], None] = log.warning,
    ) -> None:
        """`retry` may let requests outlive an outage of the gateway, which `say` is then told about."""
        urls = [gateway_url] if isinstance(gateway_url, str) else list(gateway_url)
        self._gateways = {
            url: Transport(
                url,
                api_key,
                retry=retry,
                request_seconds=request_seconds,
                # No limit: a finished rollout must not queue behind thousands of others.
                max_connections=0,
                say=say,
            )
            for url in urls
        }
        super().__init__(self._gateways[urls[0]])

    async def close(self) -> None:
        """Close the connections."""
        for transport in self._gateways.values():
            await transport.close()

    def _of(self, rollout_id: str) -> tuple[Transport, str]:
        """Return the gateway that has a rollout, and the rollout's path there."""
        transport = self._gateways[gateway_of(list(self._gateways), rollout_id)]
        return transport, f"/rollouts/{quote(rollout_id, safe='')}"

    @property
    def num_outages(self) -> int:
        """Outages of the gateways that were waited for and are over."""
        return sum(transport.num_outages for transport in self._gateways.values())

    async def health(self) -> GatewayHealth:
        """Return whether calls would be served now, and by which replicas; of several, ask the first."""
        return await self._transport.call(GatewayHealth, "GET", "/health")

    async def models(self) -> list[str]:
        """Return the names that calls may use now: the base model, runs and their served steps."""
        asked = [transport.call(ModelList, "GET", "/v1/models") for transport in self._gateways.values()]
        first, *others = [[card.id for card in listed.data] for listed in await asyncio.gather(*asked)]
        return [name for name in first if all(name in names for names in others)]

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
        gateway, path = self._of(rollout_id)
        path += f"/calls?tokens={'true' if tokens else 'false'}{'&pieces=true' if pieces else ''}"
        return await gateway.call(RolloutRecord, "GET", path)

    async def continue_ids(self, rollout_id: str, asked: ContinuedIds) -> Continued:
        """Sample continuations of token ids as calls of a rollout; the record holds their tokens.

        Use it with `retry=ONCE`: a request that is sent twice is sampled twice.
        """
        gateway, path = self._of(rollout_id)
        return await gateway.call(Continued, "POST", f"{path}/v1/completions", body=asked)

    async def demonstrate(self, rollout_id: str, demonstration: Demonstration) -> DemonstrationReceipt:
        """Record the answers of a conversation as calls of a rollout, rendered by the engine's template."""
        gateway, path = self._of(rollout_id)
        path += "/v1/demonstrations"
        return await gateway.call(DemonstrationReceipt, "POST", path, body=demonstration)
