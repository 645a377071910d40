"""The few places for uploads that are read at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from insitu.backend.api.settings import Services
from insitu.errors import Overloaded


@asynccontextmanager
async def upload_turn(services: Services) -> AsyncGenerator[None]:
    """Wait for one of the few places for uploads, but not for long."""
    wait = services.limits.upload_wait_seconds
    try:
        async with asyncio.timeout(wait):
            await services.uploads.acquire()
    except TimeoutError:
        raise Overloaded(
            f"{services.limits.max_uploads} uploads are under way, and none ended within {wait:.0f} s",
            hint="upload it again later, under the same id",
        ) from None
    try:
        yield
    finally:
        services.uploads.release()
