"""The answers to one request: each is generated, verified and recorded as a call of its own.

    render ──► generate, choice 0 ──► verify ──► derender ─┐
           ├─► generate, choice 1 ──► verify ──► derender ─┼──► one answer, choices in order
           └─► generate, choice 2 ──► verify ──► derender ─┘

An answer goes out whole: when one choice fails, the attempt fails, and none of its choices is recorded. In
a stream each choice is recorded before its own end is sent; if one breaks, so do those still open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from insitu.gateway.engines.sample import Generated
from insitu.gateway.protocols.base import Answer, Event, Rendered, StreamText, usage_of
from insitu.gateway.protocols.bounds import SEEDS
from insitu.types import derived_seed

T = TypeVar("T")


@dataclass(slots=True)
class Choice:
    """One answer of an attempt, from its first token to its record."""

    index: int
    call_id: str
    rendered: Rendered
    """The prompt, with the generate request of this choice."""
    timings: dict[str, float]
    """Seconds by phase."""
    generated: Generated = field(default_factory=Generated)
    """The generation received so far."""
    text: StreamText | None = None
    """The text sent so far, if streamed."""
    recorded: bool = False


def choices_of(
    call_id: str, rendered: Rendered, count: int, timings: dict[str, float], calls_before: int = 0
) -> list[Choice]:
    """Create the choices of a rendered request: the first has the call's id, the others `<id>-1` etc.

    `calls_before` are those of the same rollout: with the same seed, every turn would draw the same numbers.
    """
    rendered = _with_seed_of_turn(rendered, calls_before)
    return [
        Choice(index, _numbered(call_id, index), _own(rendered, call_id, index), dict(timings))
        for index in range(count)
    ]


def merged(answers: Sequence[Answer]) -> Answer:
    """Merge the answers into one with all choices."""
    first, *others = answers
    if not others:
        return first
    usages = [answer.body["usage"] for answer in answers]
    choices = [answer.body["choices"][0] | {"index": index} for index, answer in enumerate(answers)]
    num_output = sum(usage["completion_tokens"] for usage in usages)
    usage = usages[0] | usage_of(usages[0]["prompt_tokens"], num_output)
    return Answer(first.body | {"choices": choices, "usage": usage}, first.recorded)


def indexed(events: list[Event], index: int) -> list[Event]:
    """Set the index of the choice in its events."""
    for _, data in events if index else []:
        for choice in data["choices"]:
            choice["index"] = index
    return events


async def together(works: Sequence[Coroutine[object, object, T]]) -> list[T]:
    """Run all of them and return their results; the first failure cancels the others before it is raised."""
    if len(works) == 1:
        return [await works[0]]
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _numbered(call_id: str, index: int) -> str:
    return f"{call_id}-{index}" if index else call_id


def _with_seed_of_turn(rendered: Rendered, calls_before: int) -> Rendered:
    """Derive the seed of a rollout's later call from the client's; the first call has the client's own."""
    sampling = rendered.generate["sampling_params"]
    if not calls_before or sampling.get("seed") is None:
        return rendered
    sampling = sampling | {"seed": derived_seed(sampling["seed"], calls_before)}
    return replace(rendered, generate=rendered.generate | {"sampling_params": sampling})


def _own(rendered: Rendered, call_id: str, index: int) -> Rendered:
    """Give the prompt the choice's own id and increment its seed, or all choices would be the same."""
    if not index:
        return rendered
    sampling = rendered.generate["sampling_params"]
    if sampling.get("seed") is not None:
        first, beyond = SEEDS.start, SEEDS.stop
        sampling = sampling | {"seed": (sampling["seed"] + index - first) % (beyond - first) + first}
    generate = rendered.generate | {"request_id": _numbered(call_id, index), "sampling_params": sampling}
    return replace(rendered, generate=generate)
