"""WorkflowContext: what an agent knows about the rollout that it runs in."""

from __future__ import annotations

import re
import weakref
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from insitu.errors import InvalidRequest, NotFound
from insitu.plugins import ComponentConfig, nearest
from insitu.types import WORKFLOW_FUNCTION
from insitu.workflow.binding import OPENAI_URL, LLMBinding, rollout_headers
from insitu.workflow.cleanup import Callback, CleanUps
from insitu.workflow.llm import LLMSettings
from insitu.workflow.workflow import Workflow

Functions = Mapping[str, tuple[Workflow, ComponentConfig]]

_current: ContextVar[weakref.ref[WorkflowContext]] = ContextVar("insitu_rollout")
"""Weak: timers and tasks that outlive a rollout hold its context variables, but must not hold the rollout."""


class WorkflowContext:
    """One rollout of one example, seen from one of its functions."""

    def __init__(
        self,
        *,
        rollout_id: str,
        example_id: str,
        config: ComponentConfig,
        binding: LLMBinding,
        functions: Functions | None = None,
        function: str = WORKFLOW_FUNCTION,
    ) -> None:
        self.rollout_id = rollout_id
        self.example_id = example_id
        self.config = config
        """The configuration of the workflow or function that this context belongs to."""
        self.binding = binding
        self.function = function
        self._functions = functions or {}
        self._clean_ups = CleanUps()
        self._called: list[WorkflowContext] = []
        """Contexts of called functions, for tasks that go on in them after the call."""

    def llm(self, name: str | None = None) -> LLMSettings:
        """How to call `llms.<name>`; without a name its own `llm`, the only one, or the trained one."""
        return self.binding.settings(name or self._default_llm(), self.rollout_id, self.function)

    async def call(self, function: str, value: Any) -> Any:
        """What `functions.<function>` returns for `value`; its model calls carry the function's name."""
        entry = self._functions.get(function)
        if entry is None:
            raise NotFound(
                f"functions has no `{function}`{nearest(function, self._functions)}",
                hint=f"known: {', '.join(self._functions) or 'none'}",
            )
        workflow, config = entry
        inner = self._derived(function, config)
        self._called.append(inner)
        with entered(inner):
            return await workflow.run(value, inner)

    def in_function(self, name: str) -> WorkflowContext:
        """The same rollout; model calls made with this context carry the function's name."""
        return self._derived(name, self.config)

    @property
    def headers(self) -> dict[str, str]:
        """What marks a request as part of this rollout."""
        return rollout_headers(self.rollout_id, self.function)

    def environment(self) -> dict[str, str]:
        """Environment variables for a subprocess: common clients find the right model by them."""
        variables = {"INSITU_ROLLOUT_ID": self.rollout_id}
        for name in self.binding.llms:
            settings = self.binding.settings(name, self.rollout_id, self.function)
            prefix = "INSITU_LLM_" + re.sub(r"[^A-Z0-9]", "_", name.upper())
            variables |= {
                f"{prefix}_BASE_URL": settings.base_url,
                f"{prefix}_API_KEY": settings.api_key,
                f"{prefix}_MODEL": settings.model,
            }
        return variables | (_openai_variables(self.llm()) if self.binding.llms else {})

    def on_end(self, callback: Callback) -> None:
        """Run `callback` when the rollout ends, however it ends; the last one added runs first."""
        self._clean_ups.add(callback)

    async def close(self) -> list[str]:
        """Run the clean-up; returns what went wrong in it."""
        troubles = await self._clean_ups.run()
        self._called.clear()
        return troubles

    def _derived(self, function: str, config: ComponentConfig) -> WorkflowContext:
        inner = WorkflowContext(
            rollout_id=self.rollout_id,
            example_id=self.example_id,
            config=config,
            binding=self.binding,
            functions=self._functions,
            function=function,
        )
        inner._clean_ups, inner._called = self._clean_ups, self._called
        return inner

    def _default_llm(self) -> str:
        named = getattr(self.config, "llm", None)
        if isinstance(named, str) and named:
            return named
        for candidates in (list(self.binding.llms), sorted(self.binding.trained)):
            if len(candidates) == 1:
                return candidates[0]
        known = ", ".join(self.binding.llms) or "none"
        raise InvalidRequest(
            f"{self.function} does not say which of the llms it uses: {known}",
            hint="set `llm: <name>` in its configuration, or ask for context.llm('<name>')",
        )


def current_rollout() -> WorkflowContext:
    """The rollout that the calling code runs in."""
    reference = _current.get(None)
    if reference is None:
        raise InvalidRequest(
            "this code does not run in a rollout",
            hint="threads that an agent starts itself need contextvars.copy_context().run(...)",
        )
    context = reference()
    if context is None:
        raise InvalidRequest(
            "the rollout of this code has ended", hint="end tasks and threads before the agent returns"
        )
    return context


@contextmanager
def entered(context: WorkflowContext) -> Generator[None]:
    """`current_rollout()` is `context` inside the block."""
    token = _current.set(weakref.ref(context))
    try:
        yield
    finally:
        _current.reset(token)


def _openai_variables(settings: LLMSettings) -> dict[str, str]:
    variables = {
        "OPENAI_BASE_URL": settings.base_url,
        "OPENAI_API_BASE": settings.base_url,
        "OPENAI_MODEL": settings.model,
        "INSITU_MODEL": settings.model,
    }
    if (
        settings.api_key or settings.base_url != OPENAI_URL
    ):  # else the key of the user's own environment holds
        variables["OPENAI_API_KEY"] = settings.api_key
    return variables
