"""What an API process is told at start: addresses, the key and limits; and what its routes share."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from insitu.backend.ledger import Ledger
from insitu.keys import check_key, hash_key, is_loopback
from insitu.types import ModelCall

_EVERYWHERE = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared with, not bound to


class Records(Protocol):
    """What the API needs of the record store."""

    def append(self, calls: Sequence[ModelCall]) -> object:
        """Store calls, durable on return; an id that is there keeps its content."""
        ...

    def get(self, ids: Sequence[str]) -> list[ModelCall]:
        """The calls in this order, or NotFound."""
        ...

    def exists(self, ids: Sequence[str]) -> set[str]:
        """Those of `ids` that are stored."""
        ...

    def incomplete(self, ids: Sequence[str]) -> dict[str, str]:
        """Those of `ids` that broke off, with how they ended."""
        ...

    def by_rollout(self, rollout_id: str) -> list[ModelCall]:
        """The calls of one rollout."""
        ...

    def of_run(self, run: str, oldest_step: int) -> Iterator[ModelCall]:
        """The calls that policies of a run answered, from a step on."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Every bound of the API in one place."""

    max_body_bytes: int = 4 * 2**20
    max_line_bytes: int = 16 * 2**20
    max_group_bytes: int = 1024 * 2**20
    max_trajectories: int = 4096
    max_calls_per_trajectory: int = 10_000
    max_uploads: int = 16
    """Uploads read at once; others wait with their body unread."""
    upload_idle_seconds: float = 60.0
    record_lag_seconds: float = 2.0
    """How long a named call may still be on its way from the gateway's recorder."""
    max_streams: int = 256
    event_poll_seconds: float = 0.25
    heartbeat_seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """One API process. The key is kept as a hash only."""

    state_dir: Path
    key_sha256: bytes = field(repr=False)
    host: str = "127.0.0.1"
    port: int = 7623
    allowed_hosts: tuple[str, ...] = ()
    """Host names that clients may use besides loopback names and `host`."""
    limits: Limits = field(default_factory=Limits)

    @classmethod
    def with_key(
        cls, state_dir: Path, api_key: str, host: str = "127.0.0.1", port: int = 7623
    ) -> ApiSettings:
        """Settings for a plain key, refused when the address asks for a better one."""
        check_key(api_key, host)
        return cls(state_dir=state_dir, key_sha256=hash_key(api_key), host=host, port=port)

    @property
    def runs_dir(self) -> Path:
        """Where the checkpoints are, as the supervisor has it."""
        return self.state_dir / "runs"

    def accepts_key(self, key: str) -> bool:
        """Whether this is the key; takes the same time for every wrong one."""
        return hmac.compare_digest(hash_key(key), self.key_sha256)

    def accepts_host(self, name: str) -> bool:
        """Whether clients may call this server by that name (without port)."""
        bare = name.strip("[]").lower()
        if is_loopback(bare) or bare in {self.host.strip("[]").lower(), *self.allowed_hosts}:
            return True
        # Listening everywhere, any address of the machine is its name. A page that rebinds its own name to
        # this machine still sends that name, never an address.
        return self.host in _EVERYWHERE and _is_address(bare)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Services:
    """What the routes of one application share."""

    def __init__(self, settings: ApiSettings, ledger: Ledger, records: Records) -> None:
        self.settings = settings
        self.limits = settings.limits
        self.ledger = ledger
        self.records = records
        self.uploads = asyncio.Semaphore(settings.limits.max_uploads)
        self.num_streams = 0
        self.stopping = False
        """Set at SIGTERM: event streams end, so that the server can."""
