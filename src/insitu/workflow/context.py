"""WorkflowContext: the agent's view of the rollout it runs in."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Generator, Hashable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

from insitu.errors import InvalidRequest, NotFound
from insitu.plugins import ComponentConfig, nearest
from insitu.types import WORKFLOW_FUNCTION
from insitu.workflow.binding import OPENAI_URL, LLMBinding, rollout_headers
from insitu.workflow.cleanup import Callback, CleanUps
from insitu.workflow.frameworks import client_maker
from insitu.workflow.llm import LLMSettings
from insitu.workflow.workflow import Workflow

Kept = TypeVar("Kept")
Functions = Mapping[str, tuple[Workflow, ComponentConfig]]

_current: ContextVar[weakref.ref[WorkflowContext]] = ContextVar("insitu_rollout")
"""Weak: timers and tasks that outlive a rollout keep its context variables, but must not keep the rollout."""


class WorkflowContext:
    """One rollout of one example, seen from one of its functions.

    `client` and `call` return `Any`: the agent's own code knows the type.
    """

    def __init__(
        self,
        *,
        rollout_id: str,
        example_id: str,
        config: ComponentConfig,
        binding: LLMBinding,
        functions: Functions | None = None,
        function: str = WORKFLOW_FUNCTION,
        seed_key: str | None = None,
    ) -> None:
        self.rollout_id = rollout_id
        self.example_id = example_id
        self.config = config
        """The configuration of the workflow or function that this context belongs to."""
        self.binding = binding
        self.function = function
        self.seed_key = seed_key
        """The rollout's place in its run (epoch or validation, example, generation); seeds derive from it."""
        self._functions = functions or {}
        self._clean_ups = CleanUps()
        self._called: list[WorkflowContext] = []
        """Contexts of called functions, kept alive for tasks that continue in them after the call."""
        self._kept: dict[Hashable, object] = {}
        self._keeping = threading.Lock()

    def llm(self, name: str | None = None) -> LLMSettings:
        """Return how to call `llms.<name>`; by default its own `llm`, the only one, or the trained one."""
        return self._settings(name or self._default_llm())

    def client(self, framework: str, llm: str | None = None, **options: object) -> Any:
        """Create the LLM object of a framework (`"langchain"`, `"openai_agents"`, …) for `llms.<llm>`."""
        with entered(self):
            return client_maker(framework)(llm, **options)

    async def call(self, function: str, value: object) -> Any:
        """Call `functions.<function>` with `value`; its model calls carry the function's name."""
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
        """Return a context of the same rollout whose model calls carry the function's name."""
        return self._derived(name, self.config)

    def marked(self, name: str) -> WorkflowContext:
        """Like `in_function`, but cached and alive as long as the rollout, because tasks continue in it."""
        return self.kept(("function", name, id(self.config)), lambda: self._derived(name, self.config))

    def kept(self, key: Hashable, make: Callable[[], Kept]) -> Kept:
        """Return the rollout's cached value for `key`; call `make` the first time."""
        with self._keeping:
            if key not in self._kept:
                self._kept[key] = make()
            return cast(Kept, self._kept[key])

    @property
    def headers(self) -> dict[str, str]:
        """The headers that mark a request as part of this rollout."""
        return rollout_headers(self.rollout_id, self.function)

    def environment(self) -> dict[str, str]:
        """Return environment variables that point common clients in a subprocess to the right model."""
        variables = {"INSITU_ROLLOUT_ID": self.rollout_id}
        for name in self.binding.llms:
            settings = self._settings(name)
            prefix = "INSITU_LLM_" + re.sub(r"[^A-Z0-9]", "_", name.upper())
            variables |= {
                f"{prefix}_BASE_URL": settings.base_url,
                f"{prefix}_API_KEY": settings.api_key,
                f"{prefix}_MODEL": settings.model,
            }
        return variables | (_sdk_variables(self.llm()) if self.binding.llms else {})

    def on_end(self, callback: Callback) -> None:
        """Run `callback` when the rollout ends, however it ends; the last one added runs first."""
        self._clean_ups.add(callback)

    async def close(self) -> list[str]:
        """Run the clean-up; return a description of each failure."""
        troubles = await self._clean_ups.run()
        self._called.clear()
        self._kept.clear()
        return troubles

    def _derived(self, function: str, config: ComponentConfig) -> WorkflowContext:
        inner = WorkflowContext(
            rollout_id=self.rollout_id,
            example_id=self.example_id,
            config=config,
            binding=self.binding,
            functions=self._functions,
            function=function,
            seed_key=self.seed_key,
        )
        inner._clean_ups, inner._called = self._clean_ups, self._called
        inner._kept, inner._keeping = self._kept, self._keeping
        return inner

    def _settings(self, name: str) -> LLMSettings:
        return self.binding.settings(name, self.rollout_id, self.function, self.seed_key)

    def _default_llm(self) -> str:
        named = getattr(self.config, "llm", None)
        if isinstance(named, str) and named:
            return named
        for candidates in (list(self.binding.llms), sorted(self.binding.trained)):
            if len(candidates) == 1:
                return candidates[0]
        known = ", ".join(self.binding.llms) or "none"
        raise InvalidRequest(
            f"{self.function} does not say which entry of `llms` it uses; known: {known}",
            hint="set `llm: <name>` in its configuration, or ask for context.llm('<name>')",
        )


def current_rollout() -> WorkflowContext:
    """Return the rollout that the calling code runs in."""
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


def rollout_or_none() -> WorkflowContext | None:
    """Return `current_rollout()`, or None outside a rollout and after its end."""
    reference = _current.get(None)
    return reference() if reference is not None else None


@contextmanager
def entered(context: WorkflowContext) -> Generator[None]:
    """Make `context` the `current_rollout()` inside the block."""
    token = _current.set(weakref.ref(context))
    try:
        yield
    finally:
        _current.reset(token)


def _sdk_variables(settings: LLMSettings) -> dict[str, str]:
    """Return the variables that the OpenAI and Anthropic SDKs, and most libraries built on them, read."""
    variables = {
        "OPENAI_BASE_URL": settings.base_url,
        "OPENAI_API_BASE": settings.base_url,
        "OPENAI_MODEL": settings.model,
        "INSITU_MODEL": settings.model,
    }
    if settings.api_key or settings.base_url != OPENAI_URL:  # else keep the user's own key
        variables["OPENAI_API_KEY"] = settings.api_key
    if settings.headers:  # other servers of the OpenAI protocol need not speak Anthropic's
        variables["ANTHROPIC_BASE_URL"] = settings.root_url
        variables["ANTHROPIC_API_KEY"] = settings.api_key
        variables["ANTHROPIC_MODEL"] = settings.model
    return variables
