"""Work that runs at the same time and ends together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

Result = TypeVar("Result")


async def all_or_none(work: Iterable[Awaitable[Result]]) -> list[Result]:
    """Run everything concurrently; the first failure cancels the rest and is raised unchanged."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:  # after success all are done, and this changes nothing
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
