"""Model binding: resolves entries of `llms`, routing trained ones through the gateway within a rollout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import quote, urlsplit

from pydantic import SecretStr

from insitu.errors import InvalidRequest
from insitu.plugins import nearest
from insitu.types import WORKFLOW_FUNCTION, derived_seed, gateway_of
from insitu.wire.headers import FUNCTION_HEADER, ROLLOUT_HEADER
from insitu.workflow.llm import LLMSettings, without_version

OPENAI_URL = "https://api.openai.com/v1"


class LLMEntry(Protocol):
    """One entry of `llms` in the configuration."""

    @property
    def model_name(self) -> str: ...
    @property
    def api_key(self) -> SecretStr | str | None: ...
    @property
    def base_url(self) -> str | None: ...
    @property
    def options(self) -> Mapping[str, object]: ...
    @property
    def max_retries(self) -> int: ...
    @property
    def request_timeout(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class LLMBinding:
    """The entries of `llms`; trained ones are called by the run's name through the gateway."""

    llms: Mapping[str, LLMEntry]
    trained: frozenset[str] = frozenset()
    """Names in `llms`."""
    model: str = ""
    """The run's name, used as the model name of trained entries."""
    gateway_url: str = ""
    """The root of the gateway, or of the first one, without `/v1`."""
    api_key: str = field(default="", repr=False)
    address_setting: str = "base_url of the trained entry in `llms`"
    """The setting of the gateway's address."""
    address_given: bool = False
    """True if the configuration has that setting; else the address comes from the backend."""
    key_setting: str = "the trained entry in `llms`"
    """The setting that `api_key` came from."""
    recorded: bool = True
    """False: trained entries are called at their own `base_url`, and their calls belong to no rollout."""
    further_gateways: tuple[str, ...] = ()
    """The roots of the backend's other gateways."""

    @property
    def gateway_urls(self) -> tuple[str, ...]:
        """The roots of all gateways; the calls of a rollout go to one of them."""
        return (self.gateway_url, *self.further_gateways)

    def settings(
        self,
        name: str,
        rollout_id: str | None = None,
        function: str | None = None,
        seed_key: str | None = None,
    ) -> LLMSettings:
        """Return the settings for calling `llms.<name>`; on the gateway, with the rollout's own address.

        With a `seed_key`, the entry's seed becomes the rollout's own.
        """
        entry = self.llms.get(name)
        if entry is None:
            raise InvalidRequest(
                f"llms has no `{name}`{nearest(name, self.llms)}",
                hint=f"known: {', '.join(self.llms) or 'none'}",
            )
        trained = name in self.trained
        bound = (trained and self.recorded) or self.is_gateway(entry.base_url)
        url = (entry.base_url or OPENAI_URL).rstrip("/")
        gateway = self.gateway_url if rollout_id is None else gateway_of(self.gateway_urls, rollout_id)
        return LLMSettings(
            name=name,
            model=self.model if trained else entry.model_name,
            base_url=rollout_url(gateway, rollout_id, function) if bound else url,
            api_key=self.api_key if trained else _plain(entry) or (self.api_key if bound else ""),
            options=_with_own_seed(entry.options, seed_key),
            max_retries=entry.max_retries,
            request_timeout=entry.request_timeout,
            headers=rollout_headers(rollout_id, function) if bound else {},
            rollout_url=rollout_url(gateway, rollout_id, None) if bound else url,
        )

    def is_gateway(self, base_url: str | None) -> bool:
        """Return True if an untrained entry is served by the same gateway, so its calls are recorded too."""
        return bool(self.gateway_url and base_url) and is_among(base_url or "", self.gateway_urls)


def is_among(url: str, gateways: Iterable[str]) -> bool:
    """Return True if a URL is the address of one of the gateways, however it is spelled."""
    return _place(url) in map(_place, gateways)


def _with_own_seed(options: Mapping[str, object], key: str | None) -> dict[str, object]:
    """Derive the seed of one rollout: with the same one, all rollouts of an example would be the same."""
    seed = options.get("seed")
    if seed is None or key is None:
        return dict(options)
    return {**options, "seed": derived_seed(seed, key)}


def gateway_root(base_url: str) -> str:
    """``http://h:8000/v1`` → ``http://h:8000``."""
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequest(
            f"`{base_url}` is not the address of a gateway", hint="write http://host:port/v1"
        )
    return without_version(base_url)


def rollout_url(gateway_url: str, rollout_id: str | None, function: str | None) -> str:
    """Return the base URL whose calls are recorded under a rollout and one of its functions."""
    root = gateway_url.rstrip("/")
    if rollout_id is None:
        return f"{root}/v1"
    rollout = f"{root}/rollouts/{quote(rollout_id, safe='')}"
    if function is None or function == WORKFLOW_FUNCTION:
        return f"{rollout}/v1"
    return f"{rollout}/functions/{quote(function, safe='')}/v1"


def rollout_headers(rollout_id: str | None, function: str | None) -> dict[str, str]:
    """Return the same information as headers, for clients that cannot take a base URL of their own."""
    if rollout_id is None:
        return {}
    return {ROLLOUT_HEADER: rollout_id, FUNCTION_HEADER: function or WORKFLOW_FUNCTION}


def _place(url: str) -> tuple[str, str, int | None, str]:
    """Normalize a base URL so that different spellings of one address compare equal."""
    parts = urlsplit(without_version(url))
    host = "127.0.0.1" if parts.hostname in ("localhost", "::1") else parts.hostname or ""
    return parts.scheme, host, parts.port or {"http": 80, "https": 443}.get(parts.scheme), parts.path


def _plain(entry: LLMEntry) -> str:
    key = entry.api_key
    return key.get_secret_value() if isinstance(key, SecretStr) else key or ""
