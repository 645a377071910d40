"""A client of several gateways asks the one that has the rollout."""

from __future__ import annotations

from typing import Any

import pytest

from insitu.errors import Unavailable
from insitu.gateway_client import GatewayClient
from insitu.types import gateway_of
from insitu.wire.transport import ONCE


async def test_records_are_read_where_they_were_made(start_gateway: Any) -> None:
    gateways = [await start_gateway() for _ in range(2)]
    urls = [gateway.url for gateway in gateways]
    rollouts = [f"r-{index}" for index in range(8)]
    assert {gateway_of(urls, rollout) for rollout in rollouts} == set(urls)
    for rollout in rollouts:
        (own,) = [gateway for gateway in gateways if gateway.url == gateway_of(urls, rollout)]
        assert (await own.post(f"/rollouts/{rollout}/v1/chat/completions"))[0] == 200
    async with GatewayClient(urls, "default", retry=ONCE) as client:
        for rollout in rollouts:
            record = await client.rollout_record(rollout)
            assert (len(record.calls), record.seen) == (1, 1)
        assert "tiny" in await client.models()


async def test_names_are_those_that_all_of_them_serve(start_gateway: Any) -> None:
    gateway = await start_gateway()
    async with GatewayClient([gateway.url, "http://127.0.0.1:9"], "default", retry=ONCE) as client:
        with pytest.raises(Unavailable):
            await client.models()
