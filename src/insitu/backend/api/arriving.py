"""The parts of a body as they arrive, at a minimum rate: a client that trickles does not keep its place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from insitu.backend.api.settings import Limits
from insitu.errors import TooSlow


async def arriving(chunks: AsyncIterator[bytes], limits: Limits) -> AsyncIterator[bytes]:
    """Yield the chunks; raise TooSlow if they come too slowly. The time that the reader takes is free."""
    loop = asyncio.get_running_loop()
    iterator = aiter(chunks)
    total, waited = 0, 0.0
    while True:
        allowed = limits.body_seconds + total / limits.min_body_rate
        started = loop.time()
        try:
            async with asyncio.timeout(max(0.0, allowed - waited)):
                chunk = await anext(iterator)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise TooSlow(
                f"only {total} bytes of the body arrived in {allowed:.0f} s",
                hint="send it again, with the same id",
            ) from None
        waited += loop.time() - started
        total += len(chunk)
        yield chunk
