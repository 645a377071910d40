"""Settings of an API process (addresses, key, limits) and the services its routes share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from insitu.access.audit_log import AUDIT_FILE
from insitu.access.day_use import API_USE_FILE
from insitu.access.key_file import KEYS_FILE
from insitu.access.projects import Project
from insitu.access.shares import Shares, Turns
from insitu.backend.ledger import Ledger
from insitu.backend.ledger.rows import Job
from insitu.backend.plan.teachers import unknown_teacher
from insitu.records.call_head import CallHead
from insitu.records.old_calls import Referred
from insitu.system.keys import check_key, hash_key, is_address, is_loopback
from insitu.types import ModelCall, StepSettings, served_teacher

_EVERYWHERE = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared with, not bound to


class Records(Protocol):
    """The part of the record store that the API uses."""

    def append(self, calls: Sequence[ModelCall]) -> object:
        """Store calls durably; an id already stored keeps its content."""
        ...

    def get(self, ids: Sequence[str]) -> list[ModelCall]:
        """Return the calls in this order, or raise NotFound."""
        ...

    def exists(self, ids: Sequence[str]) -> set[str]:
        """Return those of `ids` that are stored."""
        ...

    def heads(self, ids: Sequence[str]) -> dict[str, CallHead]:
        """Return what is known of the stored calls among `ids` without their tokens."""
        ...

    def by_rollout(self, rollout_id: str) -> list[ModelCall]:
        """Return the calls of one rollout."""
        ...

    def of_run(self, run: str, oldest_step: int) -> Iterator[ModelCall]:
        """Yield the calls answered by a run's policies from `oldest_step` on."""
        ...

    def delete_of_run(self, run: str, referred: Referred) -> int:
        """Delete the rollouts in which a run's policies answered, but those referred to; count the calls."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """All limits of the API in one place."""

    max_head_bytes: int = 32 * 2**10
    """Bytes of a request's address and headers."""
    max_body_bytes: int = 4 * 2**20
    max_line_bytes: int = 16 * 2**20
    max_line_values: int = 2**21
    """Values in a line of a group; an upper bound is counted before it is parsed."""
    max_group_bytes: int = 1024 * 2**20
    max_body_values: int = 2**19
    """Values in a JSON body."""
    max_training_values: int = 2**24
    """Values in the body of ART's `_train_model`, which is parsed at once."""
    max_adapter_bytes: int = 4 * 2**30
    max_trajectories: int = 4096
    max_calls_per_trajectory: int = 10_000
    max_uploads: int = 16
    """Uploads read concurrently; others wait with their body unread."""
    upload_wait_seconds: float = 30.0
    """Longest wait of an upload for its turn."""
    body_seconds: float = 30.0
    """Longest time that a body may take, beyond what its bytes take at `min_body_rate`."""
    min_body_rate: float = 16 * 2**10
    """Bytes per second that a client must send on average."""
    max_connections: int = 4096
    max_newcomers: int = 256
    """Connections without a valid key so far; of more, the oldest is closed."""
    head_seconds: float = 15.0
    """Longest time for the headers of a request, and from the connection to the first valid key."""
    record_lag_seconds: float = 2.0
    """Time allowed for the gateway's recorder to store a call that a request names."""
    max_call_age_seconds: float | None = None
    """Calls that are older may be deleted, so no group may name them."""
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
    teachers: tuple[str, ...] = ()
    """Names of `insitu serve --teacher`; their URLs and keys stay with the supervisor."""
    publication: str = "adapter"
    """The supervisor's mode: with `merged`, one version is served at a time."""
    database_url: str | None = field(default=None, repr=False)
    """PostgreSQL; None for SQLite in the state directory."""
    limits: Limits = field(default_factory=Limits)

    @classmethod
    def with_key(
        cls, state_dir: Path, api_key: str, host: str = "127.0.0.1", port: int = 7623
    ) -> ApiSettings:
        """Build settings from a plain key; reject one that is too weak for the address."""
        check_key(api_key, host)
        return cls(state_dir=state_dir, key_sha256=hash_key(api_key), host=host, port=port)

    @property
    def keys_file(self) -> Path:
        """The keys that `insitu keys` creates; it need not exist."""
        return self.state_dir / KEYS_FILE

    @property
    def use_file(self) -> Path:
        """The use of each created key at the API, today."""
        return self.state_dir / API_USE_FILE

    @property
    def audit_file(self) -> Path:
        """The log of changes, shared with `insitu keys`."""
        return self.state_dir / AUDIT_FILE

    @property
    def runs_dir(self) -> Path:
        """The checkpoints' directory, the same as the supervisor's."""
        return self.state_dir / "runs"

    def accepts_host(self, name: str) -> bool:
        """Return True if clients may call this server by that name (without port)."""
        bare = name.strip("[]").lower()
        if is_loopback(bare) or bare in {self.host.strip("[]").lower(), *self.allowed_hosts}:
            return True
        # Listening on all interfaces, accept any IP address. A DNS-rebinding page still sends its own name,
        # never an address.
        return self.host in _EVERYWHERE and is_address(bare)


class Services:
    """State shared by the routes of one application."""

    def __init__(self, settings: ApiSettings, ledger: Ledger, records: Records) -> None:
        self.settings = settings
        self.limits = settings.limits
        self.ledger = ledger
        self.records = records
        self.uploads = Turns(settings.limits.max_uploads, "uploads under way")
        self.streams = Shares(settings.limits.max_streams, "open event streams")
        self.num_waiting = 0
        """Requests for a job that are answered when it ends."""
        self.stopping = False
        """Set on shutdown: event streams end, so that the server can."""

    def create_job(
        self,
        sender: Project,
        run: str,
        key: str,
        groups: Sequence[str],
        settings: StepSettings,
        request_hash: str,
    ) -> Job:
        """Queue a step, unless its teacher is unknown here; see `Ledger.create_job`.

        `run` is a stored name; the teacher is named as the sender knows it.
        """
        teacher = served_teacher(settings)
        if teacher is not None and teacher not in self.settings.teachers:
            raise unknown_teacher(teacher, self.settings.teachers)
        settings = replace(settings, teacher=sender.stored_teacher(settings.teacher))
        return self.ledger.create_job(run, key, groups, settings, request_hash)
