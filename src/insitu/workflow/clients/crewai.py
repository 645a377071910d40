"""CrewAI: ``crewai.LLM``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TypeVar

from insitu.workflow.clients.sdk import Request, call_options, mark
from insitu.workflow.context import current_rollout
from insitu.workflow.frameworks import package

Answer = TypeVar("Answer")


def model(llm: str | None = None, **options: object) -> object:
    """Return an LLM for `llms.<llm>`, for agents, tasks and crews, blocking and async."""
    crewai = package("crewai", "crewai")
    sdk = package("openai", "crewai")
    context = current_rollout()
    settings = context.llm(llm)
    args: dict[str, object] = {
        "model": settings.model,
        "custom_openai": True,  # use this address whatever the model's name looks like
        "base_url": settings.rollout_url,
        "api_key": settings.api_key,
        "max_retries": settings.max_retries,
        **({} if settings.request_timeout is None else {"timeout": settings.request_timeout}),
        **call_options(sdk.resources.chat.completions.Completions.create, settings),
    }
    if settings.headers:
        args |= {"default_headers": dict(settings.headers), "interceptor": _marker()()}
    made = crewai.LLM(**args | options)
    context.on_end(functools.partial(_close, made))
    return made


async def _close(made: object) -> None:
    """Close both clients: CrewAI opens both at once and closes neither."""
    for name in ("_client", "_async_client"):
        client = getattr(made, name, None)
        if client is not None:
            closing = client.close()
            if inspect.isawaitable(closing):
                await closing


@functools.cache
def _marker() -> Callable[[], object]:
    """Return an interceptor class, CrewAI's hook into every request."""
    base = package("crewai.llms.hooks.base", "crewai").BaseInterceptor

    class Marker(base):
        def on_outbound(self, message: Request) -> Request:
            mark(message)
            return message

        def on_inbound(self, message: Answer) -> Answer:
            return message

        async def aon_outbound(self, message: Request) -> Request:
            return self.on_outbound(message)

        async def aon_inbound(self, message: Answer) -> Answer:
            return message

    return Marker
