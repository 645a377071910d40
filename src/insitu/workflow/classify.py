"""Maps an agent's exception to the rollout's ending, without importing the library that raised it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from insitu.errors import attempt, members_of, message_of
from insitu.types import Ending
from insitu.workflow.outcome import WorkflowFailed

_CONNECTION_ERRORS = frozenset(
    {
        "APIConnectionError",  # openai, anthropic
        "APITimeoutError",
        "ClientConnectionError",  # aiohttp
        "TransportError",  # httpx
        "ConnectionError",  # requests, the standard library
    }
)
_OVERFLOW_ERRORS = frozenset({"ContextWindowExceededError"})  # litellm
_OVERFLOW_TEXT = re.compile(
    r"maximum\s+context\s+length|maximum\s+model\s+length|context_length_exceeded|max_model_len",
    re.IGNORECASE,
)
_STEP_LIMIT_ERRORS = frozenset(
    {
        "GraphRecursionError",  # LangGraph
        "ModelCallLimitExceededError",  # LangChain's middleware
        "ToolCallLimitExceededError",
        "MaxTurnsExceeded",  # OpenAI Agents
        "LlmCallsLimitExceededError",  # Google ADK
        "UsageLimitExceeded",  # PydanticAI
        "AgentMaxStepsError",  # smolagents
        "PipelineMaxComponentRuns",  # Haystack
    }
)
_STEP_LIMIT_TEXT = re.compile(r"\AMax iterations of \d+ reached")  # LlamaIndex has no class for it
_MAX_CHAIN = 100


def ending_of(error: BaseException) -> Ending:
    """Return the ending for an exception: the first in its chain that says more than "it failed"."""
    for link in chain_of(error):
        ending = _ending_of_one(link)
        if ending is not None:
            return ending
    return Ending.TOOL_ERROR


def says_overflow(text: str) -> bool:
    """Return True if an engine's message means that the conversation no longer fits the model."""
    return _OVERFLOW_TEXT.search(text) is not None


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception, its causes and contexts, and the members of groups, each once."""
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending and len(seen) < _MAX_CHAIN:
        link = pending.pop(0)
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        pending.extend([*members_of(link), link.__cause__, link.__context__])


def _ending_of_one(error: BaseException) -> Ending | None:
    if isinstance(error, WorkflowFailed):
        return error.ending
    names = {parent.__name__ for parent in type(error).__mro__}
    if names & _OVERFLOW_ERRORS:
        return Ending.CONTEXT_OVERFLOW
    if names & _CONNECTION_ERRORS:
        return Ending.INFRASTRUCTURE
    if names & _STEP_LIMIT_ERRORS or _STEP_LIMIT_TEXT.search(message_of(error)):
        return Ending.STEP_LIMIT
    status = status_of(error)
    if status is None:
        return None
    if status >= 500 or status == 429:
        return Ending.INFRASTRUCTURE
    if status == 400 and says_overflow(f"{message_of(error)} {body_of(error)}"):
        return Ending.CONTEXT_OVERFLOW
    return None


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of an exception, from itself or its `response`."""
    for holder in (error, _attribute(error, "response")):
        for name in ("status_code", "status"):
            value = _attribute(holder, name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def body_of(error: BaseException) -> str:
    parts = (_attribute(error, "body"), _attribute(_attribute(error, "response"), "text"))
    return " ".join(f"{part}" for part in parts if isinstance(part, str | bytes | dict))


def _attribute(holder: object, name: str) -> object:
    """Read an attribute of a foreign object; None if that fails: some raise until the body has been read."""
    return attempt(lambda: getattr(holder, name, None), lambda _: None)
