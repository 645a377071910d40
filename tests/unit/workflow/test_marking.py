"""`insitu.function` names the part of an agent that calls, for as long as its block or call lasts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

import insitu
from insitu.errors import InvalidRequest
from insitu.workflow.context import WorkflowContext, current_rollout, entered


@insitu.function("planner")
async def plan() -> str:
    """Plans."""
    await asyncio.sleep(0)
    return current_rollout().function


@insitu.function("writer")
def write(fail: bool = False) -> str:
    if fail:
        raise KeyError("x")
    return current_rollout().function


async def test_blocks_nest_and_end(context: WorkflowContext) -> None:
    with entered(context):
        with insitu.function("outer"):
            assert (current_rollout().function, await plan(), write()) == ("outer", "planner", "writer")
            assert current_rollout().headers == {"x-insitu-rollout": "r1", "x-insitu-function": "outer"}
        with pytest.raises(KeyError):
            write(fail=True)
        assert current_rollout() is context
    assert plan.__doc__ == "Plans."


async def test_tasks_at_once_keep_their_own(context: WorkflowContext) -> None:
    async def named(name: str) -> str:
        with insitu.function(name):
            await asyncio.sleep(0.001)
            return current_rollout().function

    names = [f"f{i}" for i in range(50)]
    with entered(context):
        assert await asyncio.gather(*map(named, names)) == names


async def test_a_task_begun_in_a_block_stays_in_it(context: WorkflowContext) -> None:
    async def later() -> str:
        await asyncio.sleep(0.01)
        return current_rollout().function

    with entered(context):
        with insitu.function("planner"):
            task = asyncio.create_task(later())
        assert await task == "planner"


async def test_outside_a_rollout_it_does_nothing() -> None:
    with insitu.function("planner"):
        assert insitu.workflow.context.rollout_or_none() is None
    with pytest.raises(InvalidRequest, match="does not run in a rollout"):
        await plan()


@pytest.mark.parametrize("name", ["", "a b", ".x", "x" * 65, "ä"])
def test_names_that_the_gateway_refuses(name: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot be the name"):
        insitu.function(name)


def test_generators_are_refused() -> None:
    def parts() -> Iterator[int]:
        yield 1

    async def async_parts() -> AsyncIterator[int]:
        yield 1

    for generator in (parts, async_parts):
        with pytest.raises(InvalidRequest, match="is a generator"):
            insitu.function("x")(generator)
    mark = insitu.function("x")
    with mark, pytest.raises(InvalidRequest, match="entered twice"), mark:
        pass
