"""Hints: the next thing to do about an agent's exception, where its message alone does not say."""

from __future__ import annotations

import re

from insitu.errors import InsituError, message_of
from insitu.types import Ending
from insitu.workflow.binding import LLMBinding
from insitu.workflow.classify import body_of, chain_of, ending_of, status_of

_NOT_AWAITED = re.compile(r"'coroutine' object")
_NOT_ASYNC = re.compile(r"object \S+ can't be used in 'await' expression")
_LIMIT = re.compile(r"maximum\s+(?:context|model)\s+length\s+(?:is|of)\s+(\d+)", re.IGNORECASE)
_LENGTH = re.compile(
    r"(?:length|has|contains(?: at least)?|requested)\s+(\d+)(?!\d| characters)", re.IGNORECASE
)


def hint_of(error: BaseException, binding: LLMBinding) -> str:
    """Return what to change, or an empty string; insitu's own errors say it themselves."""
    links = list(chain_of(error))
    if any(isinstance(link, InsituError) and link.hint for link in links):
        return ""
    wrong_use = " ".join(message_of(link) for link in links if isinstance(link, AttributeError | TypeError))
    if _NOT_AWAITED.search(wrong_use):
        return "a call of an async client was not awaited: write `await`, and make the entry `async def`"
    if _NOT_ASYNC.search(wrong_use):
        return (
            "the call is not asynchronous: drop `await` and write the entry as `def`, or use an async client"
        )
    if ending_of(error) is Ending.CONTEXT_OVERFLOW:
        return overflow_hint(" ".join(f"{message_of(link)} {body_of(link)}" for link in links))
    if any(status_of(link) == 401 for link in links):
        return _key_hint(binding)
    return ""


def overflow_hint(text: str) -> str:
    """Name the option that raises the engine's limit, with the next power of two that `text` asks for."""
    found = _LIMIT.search(text)
    if found is None:
        return "shorten the conversation, or serve longer ones: insitu serve --max-seq-length N"
    limit = int(found[1])
    asked = max([limit + 1, *(int(number) for number in _LENGTH.findall(text))])
    return (
        f"shorten the conversation or lower max_tokens, or serve more than {limit} tokens: "
        f"insitu serve --max-seq-length {2 ** (asked - 1).bit_length()}"
    )


def _key_hint(binding: LLMBinding) -> str:
    settings = ", ".join(f"llms.{name}.api_key" for name in binding.llms) or "the key in the agent's code"
    return (
        f"a server rejected the key: check {settings}; the gateway takes the key that `insitu serve` was "
        "started with (INSITU_API_KEY there, else `default`)"
    )
