"""ValidationBeside: validates a step on a leased version while later steps train.

    step 4 is over ─► lease of run@4 ─► journal: validating ─► rollouts ─► journal: validated ─► released
                      └─ steps 5, 6 … train and are published meanwhile

One at a time. After a crash, the validation that the journal names as not over goes on, on the same step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from insitu.errors import InsituError
from insitu.harness.files.metrics import ValidationEntry
from insitu.harness.interfaces import events
from insitu.harness.loop.running_loop import RunningLoop
from insitu.harness.loop.validation import takes_plans, validate


class ValidationBeside:
    """The validations of an asynchronous run; `on_entry` takes the result while the version is leased."""

    def __init__(self, loop: RunningLoop, on_entry: Callable[[ValidationEntry], Awaitable[None]]) -> None:
        self._loop = loop
        self._on_entry = on_entry
        self._task: asyncio.Task[None] | None = None

    async def begin(self, epoch: int, share: float | None) -> bool:
        """Begin to validate the current weights; False if they cannot stay served while training goes on."""
        loop = self._loop
        await self.end()
        if not takes_plans(loop.builder):
            return False
        step = loop.state.step
        async with AsyncExitStack() as stack:
            model = await stack.enter_async_context(loop.adapter.leased(step))
            if model is None:
                return False
            begun = loop.note(events.Validating(epoch, step, share))
            self._task = asyncio.create_task(self._validate(begun, model, stack.pop_all()))
        return True

    async def resume(self) -> None:
        """Go on with the validation that the journal names as not over; say so if its step is not served."""
        loop = self._loop
        begun = loop.state.validating
        if begun is None or loop.run.validation is None:
            return
        why = "the backend serves only the newest step"
        async with AsyncExitStack() as stack:
            try:
                model = await stack.enter_async_context(loop.adapter.leased(begun.step))
            except InsituError as error:
                model, why = None, str(error)
            if model is None:
                loop.run.progress.warn(f"The validation of step {begun.step} cannot go on: {why}")
                return
            self._task = asyncio.create_task(self._validate(begun, model, stack.pop_all()))

    def check(self) -> None:
        """Raise the error of the validation, if it has failed."""
        if self._task is not None and self._task.done():
            task, self._task = self._task, None
            task.result()

    async def end(self) -> None:
        """Wait until the validation is over; each of its rollouts has a deadline."""
        if self._task is not None:
            task, self._task = self._task, None
            await task

    async def aclose(self) -> None:
        """Cancel the validation and wait for its clean-up; its rollouts stay on disk."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _validate(self, begun: events.Validating, model: str, lease: AsyncExitStack) -> None:
        run, builder = self._loop.run, self._loop.builder
        async with lease:
            epoch, share = begun.epoch, begun.pass_share
            entry = await validate(run, builder, epoch, begun.step, run.run_id, share, model)
            await self._on_entry(entry)
