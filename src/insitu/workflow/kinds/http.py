"""`_type: http` and `--endpoint`: an agent behind an HTTP address."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

import aiohttp
from pydantic import AfterValidator, Field, SecretStr

from insitu.errors import InsituError, escape, one_line
from insitu.json_values import JsonValue, as_object, parse_json
from insitu.plugins import ComponentConfig, Kind, Parts, register
from insitu.types import Ending
from insitu.wire.headers import BASE_URL_HEADER, MODEL_HEADER
from insitu.wire.transport import text_of
from insitu.workflow.classify import says_overflow
from insitu.workflow.context import WorkflowContext
from insitu.workflow.hints import overflow_hint
from insitu.workflow.kinds.json_path import JsonPath
from insitu.workflow.outcome import WorkflowFailed
from insitu.workflow.workflow import Workflow

MAX_BODY_BYTES = 8 * 1024 * 1024
_CONNECT_SECONDS = 30.0
_SHOWN_BYTES = 500


def _checked_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("write it as http://host:port/path")
    return url


def _checked_path(path: str) -> str:
    try:
        JsonPath.parse(path)
    except InsituError as error:
        raise ValueError(str(error)) from error
    return path


class HttpConfig(ComponentConfig):
    """The agent's address, and the path of the result in its answer."""

    url: Annotated[str, AfterValidator(_checked_url)]
    """The address that each input is posted to."""
    timeout_seconds: float = Field(300.0, gt=0)
    """Time for one answer."""
    result_json_path: Annotated[str, AfterValidator(_checked_path)] = "$"
    """JSONPath of the result in the answer; `$` is all of it."""
    headers: dict[str, SecretStr] = Field(default_factory=dict)
    """Further headers of every request."""
    llm: str | None = None
    """The entry of `llms` whose address the agent receives; by default a trained one, or the only one."""


@register(Kind.WORKFLOW, "http", HttpConfig)
class HttpWorkflow(Workflow):
    """Posts each input as JSON; the headers tell the agent how to reach the rollout's model."""

    def __init__(self, config: HttpConfig, parts: Parts) -> None:  # noqa: ARG002 - every maker takes parts
        self._config = config
        self._path = JsonPath.parse(config.result_json_path)
        self._headers = {name: value.get_secret_value() for name, value in config.headers.items()}
        self._session: aiohttp.ClientSession | None = None

    async def run(self, value: object, context: WorkflowContext) -> JsonValue:
        """Send one request; the answer must be JSON."""
        body = as_object(value)
        try:
            async with self._opened().post(
                self._config.url,
                json={"input": value} if body is None else body,
                headers=self._headers | rollout_address(context),
                allow_redirects=False,  # the configured headers are for this address only
            ) as answer:
                data = await _read(answer)
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(error) from error
        return self._result(answer, data)

    async def aclose(self) -> None:
        """Close the connections of all runs."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(
                # One connection per request: the agent may close an idle one just as it is reused.
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                cookie_jar=aiohttp.DummyCookieJar(),  # rollouts share nothing
                timeout=aiohttp.ClientTimeout(
                    total=self._config.timeout_seconds, sock_connect=_CONNECT_SECONDS
                ),
            )
        return self._session

    def _result(self, answer: aiohttp.ClientResponse, data: bytes) -> JsonValue:
        if not 200 <= answer.status < 300:
            raise self._refused(answer, data)
        try:
            parsed = parse_json(data)
        except (ValueError, RecursionError) as error:
            raise WorkflowFailed(
                f"{self._config.url} did not answer with JSON ({one_line(str(error))}): {_head(data)}"
            ) from None
        return self._path.extract(parsed)

    def _lost(self, error: Exception) -> WorkflowFailed:
        # A timeout of the whole request is a bare TimeoutError; a connect timeout is a ClientError.
        if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
            return WorkflowFailed(
                f"{self._config.url} did not answer within {self._config.timeout_seconds:g} s",
                ending=Ending.TIMEOUT,
            )
        return WorkflowFailed(
            f"{self._config.url}: {text_of(error)}",
            ending=Ending.INFRASTRUCTURE,
            hint="start the service, or correct the address of the agent",
        )

    def _refused(self, answer: aiohttp.ClientResponse, data: bytes) -> WorkflowFailed:
        said = f"{self._config.url} answered {answer.status}: {_head(data)}"
        if answer.status >= 500 or answer.status == 429:
            return WorkflowFailed(said, ending=Ending.INFRASTRUCTURE)
        text = data.decode("utf-8", "replace")
        if answer.status == 400 and says_overflow(text):
            return WorkflowFailed(said, ending=Ending.CONTEXT_OVERFLOW, hint=overflow_hint(text))
        target = answer.headers.get("location", "")
        return WorkflowFailed(said, hint=f"set the url to {one_line(target)}" if target else "")


def rollout_address(context: WorkflowContext) -> dict[str, str]:
    """Return headers with which a remote agent routes its model calls into the rollout."""
    name = getattr(context.config, "llm", None) or min(context.binding.trained, default=None)
    if name is None and len(context.binding.llms) != 1:
        return context.headers
    settings = context.llm(name)
    return context.headers | {BASE_URL_HEADER: settings.base_url, MODEL_HEADER: settings.model}


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    data = bytearray()
    async for chunk in answer.content.iter_any():
        data += chunk
        if len(data) > MAX_BODY_BYTES:
            raise WorkflowFailed(f"{answer.url} answered with more than {MAX_BODY_BYTES} bytes")
    return bytes(data)


def _head(data: bytes) -> str:
    return escape(data[:_SHOWN_BYTES].decode("utf-8", "replace").strip()) or "(nothing)"
