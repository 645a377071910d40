"""The model behind a judge: one chat call, retried while the server is busy or unreachable."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Protocol

import aiohttp
from yarl import URL

from insitu.datasets.values import parse_json
from insitu.errors import InvalidRequest, UpstreamError
from insitu.rewards.judges.judged_rollout import judged_rollout

_RETRIED_STATUS = frozenset({408, 429, 500, 502, 503, 504})
_BROKEN = (aiohttp.ClientError, TimeoutError, OSError)
_FIRST_PAUSE_SECONDS = 0.2
_MAX_PAUSE_SECONDS = 10.0
_DEFAULT_TIMEOUT_SECONDS = 60.0
_MAX_ANSWER_BYTES = 4 * 2**20

Message = Mapping[str, str]


class JudgeLlm(Protocol):
    """The settings of an entry of `llms` that a judge needs."""

    @property
    def model(self) -> str: ...
    @property
    def base_url(self) -> str: ...
    @property
    def api_key(self) -> str: ...
    @property
    def options(self) -> Mapping[str, object]: ...
    @property
    def max_retries(self) -> int: ...
    @property
    def request_timeout(self) -> float | None: ...
    @property
    def headers(self) -> Mapping[str, str]: ...


class _TryAgain(Exception):
    """A failure worth retrying: the reason, and the seconds that the server asks to wait, if any."""

    def __init__(self, reason: str, seconds: float | None = None) -> None:
        super().__init__(reason)
        self.seconds = seconds


class JudgeModel:
    """An entry of `llms` used as a judge. Its answers are never trained on.

    Calls through the rollout's own gateway are recorded under the judged rollout, as the function
    `<evaluator>`; those that compare a whole group belong to no single rollout.
    """

    def __init__(self, name: str, llm: JudgeLlm) -> None:
        base = _base_url(name, llm.base_url)
        if llm.options.get("stream") or llm.options.get("n") not in (None, 1):
            raise InvalidRequest(
                f"llms.{name}: a judge gives one whole answer", hint="remove `stream` and `n`"
            )
        self._name, self._llm = name, llm
        self._url = base.joinpath("chat", "completions").with_query(base.query)
        self._shown = str(self._url.with_query(None))
        self._seconds = llm.request_timeout or _DEFAULT_TIMEOUT_SECONDS
        self._session: aiohttp.ClientSession | None = None

    async def ask(self, messages: Sequence[Message]) -> str:
        """Return the text of the answer; raise UpstreamError if there is none after the last attempt."""
        attempts = 1 + max(0, self._llm.max_retries)
        for attempt in range(attempts):
            try:
                return await self._ask_once(messages)
            except _TryAgain as error:
                if attempt + 1 == attempts:
                    raise UpstreamError(
                        f"judge llms.{self._name} at {self._shown} failed {attempts} times, last with {error}"
                    ) from None
                await asyncio.sleep(_pause(attempt, error.seconds))
        raise AssertionError("the loop ends by itself")

    async def aclose(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _ask_once(self, messages: Sequence[Message]) -> str:
        body = {**self._llm.options, "model": self._llm.model, "messages": list(messages)}
        # A redirect would send prompt and key to an address that nobody configured.
        request = self._open_session().post(
            self._url, json=body, headers=self._headers(), allow_redirects=False
        )
        try:
            async with request as response:
                text = await self._read(response)
        except _BROKEN as error:
            why = f"no answer within {self._seconds:g} s" if isinstance(error, TimeoutError) else error
            raise _TryAgain(self._redact(f"{type(error).__name__}: {why}")) from None
        if response.status in _RETRIED_STATUS:
            raise _TryAgain(self._status(response.status, text), _retry_after(response.headers))
        if response.status != 200:
            raise UpstreamError(
                f"judge llms.{self._name} at {self._shown} answered {self._status(response.status, text)}"
            )
        return self._content(text)

    async def _read(self, response: aiohttp.ClientResponse) -> str:
        data = bytearray()
        async for chunk in response.content.iter_chunked(64 * 2**10):
            data += chunk
            if len(data) > _MAX_ANSWER_BYTES:
                raise UpstreamError(
                    f"judge llms.{self._name} answered with more than {_MAX_ANSWER_BYTES} bytes"
                )
        return data.decode(errors="replace")

    def _content(self, text: str) -> str:
        try:
            answer = parse_json(text)
        except ValueError:
            answer = None
        match answer:
            case {"choices": [{"message": {"content": content}}, *_]}:
                return content if isinstance(content, str) else ""
            case _:
                raise UpstreamError(
                    f"judge llms.{self._name} at {self._shown} did not answer as a chat model does: "
                    f"{self._redact(text)[:200]!r}"
                )

    def _headers(self) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self._llm.api_key}"} if self._llm.api_key else {}
        judged = judged_rollout()
        marks = judged.headers(self._llm.base_url) if judged else {}
        return {**self._llm.headers, **marks, **key}

    def _status(self, status: int, text: str) -> str:
        return f"{status}: {' '.join(self._redact(text).split())[:200]}"

    def _redact(self, text: str) -> str:
        """Mask the key: servers repeat a key that they reject."""
        return text.replace(self._llm.api_key, "***") if self._llm.api_key else text

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            limit = aiohttp.ClientTimeout(total=self._seconds, connect=min(10.0, self._seconds))
            self._session = aiohttp.ClientSession(timeout=limit)
        return self._session


def _base_url(name: str, text: str) -> URL:
    base = URL(text)
    if base.scheme not in ("http", "https") or not base.host:
        raise InvalidRequest(
            f"llms.{name} is a judge and needs a base_url that starts with http:// or https://"
        )
    if base.user is not None or base.password is not None:
        raise InvalidRequest(
            f"llms.{name}: base_url holds a user or password", hint="put the key into api_key"
        )
    return base


def _pause(attempt: int, wanted: float | None) -> float:
    grown = min(_MAX_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2**attempt)
    return max(random.uniform(0.5, 1.0) * grown, min(wanted or 0.0, _MAX_PAUSE_SECONDS))  # noqa: S311


def _retry_after(headers: Mapping[str, str]) -> float | None:
    try:
        return max(0.0, float(headers.get("Retry-After", "")))
    except ValueError:
        return None
