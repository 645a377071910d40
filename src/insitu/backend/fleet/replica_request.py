"""`insitu replicas`: ask the backend of a state directory for another number of engines, and wait for it.

    command:    wanted_replicas.json   which request, how many engines
    supervisor: replicas.json          the same request: what is being done, what was done, why it was not

Each side writes its own file and reads the other's. The supervisor removes both when it starts.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from annotated_types import Interval

from insitu.errors import ChildFailed, Conflict, DeadlineExceeded, NotFound
from insitu.system.durable import write_atomic
from insitu.wire.message import Answer, Malformed, encode, read

MAX_REPLICAS = 1024
_WANTED, _OUTCOME = "wanted_replicas.json", "replicas.json"
_HEARD_SECONDS = 15.0
"""The supervisor looks, and reports, twice a second."""
_POLL_SECONDS = 0.2
_Kind = TypeVar("_Kind", bound=Answer)


@dataclass(frozen=True, slots=True)
class WantedReplicas(Answer):
    """A request."""

    id: str
    num_replicas: Annotated[int, Interval(ge=1, le=MAX_REPLICAS)]


@dataclass(frozen=True, slots=True)
class ReplicasOutcome(Answer):
    """The supervisor's account of a request: under way, done, or why not."""

    id: str
    state: Literal["working", "done", "failed"]
    message: str
    hint: str = ""


def forget(state_dir: Path) -> None:
    """Remove what an earlier supervisor was asked for."""
    for name in (_WANTED, _OUTCOME):
        (state_dir / name).unlink(missing_ok=True)


def wanted_replicas(state_dir: Path) -> WantedReplicas | None:
    """Return the last request; None if there is none."""
    return _read(WantedReplicas, state_dir / _WANTED)


def report(state_dir: Path, outcome: ReplicasOutcome) -> None:
    """Tell the command how far its request is."""
    write_atomic(state_dir / _OUTCOME, encode(outcome), 0o600)


def ask(state_dir: Path, num_replicas: int, deadline_seconds: float, say: Callable[[str], None]) -> str:
    """Ask for so many engines; return what was done when it is done. `say` is told what is being done.

    Raise NotFound if no supervisor hears it, Conflict if another request takes its place, ChildFailed if the
    supervisor cannot do it.
    """
    wanted = WantedReplicas(uuid.uuid4().hex, num_replicas)
    if not state_dir.is_dir():
        raise NotFound(f"{state_dir} is not the state directory of a backend", hint="give its --state-dir")
    write_atomic(state_dir / _WANTED, encode(wanted), 0o600)
    began, said = time.monotonic(), ""
    while True:
        outcome = _read(ReplicasOutcome, state_dir / _OUTCOME)
        if outcome is not None and outcome.id == wanted.id:
            if outcome.state == "failed":
                raise ChildFailed(outcome.message, hint=outcome.hint)
            if outcome.state == "done":
                return outcome.message
        doing = "" if outcome is None or outcome.state != "working" else outcome.message
        if doing and doing != said:  # perhaps for a request before
            said = doing
            say(doing)
        last = wanted_replicas(state_dir)
        if last is not None and last.id != wanted.id:
            raise Conflict(f"another request has taken its place, for {last.num_replicas} replicas")
        waited = time.monotonic() - began
        if _silent_seconds(state_dir) > _HEARD_SECONDS or (not doing and waited > _HEARD_SECONDS):
            (state_dir / _WANTED).unlink(missing_ok=True)
            raise NotFound(
                f"no backend with a loaded model and the state directory {state_dir} answers",
                hint="give the --state-dir of a running `insitu serve`; one that starts takes --replicas",
            )
        if waited > deadline_seconds:
            raise DeadlineExceeded(
                f"{num_replicas} replicas were not there in {deadline_seconds:g} s; the backend goes on",
                hint=f"see {state_dir / 'logs' / 'supervisor.log'}, or wait longer: --deadline-seconds",
            )
        time.sleep(_POLL_SECONDS)


def _silent_seconds(state_dir: Path) -> float:
    """Return the age of the supervisor's last report; without one it is infinite."""
    try:
        return time.time() - (state_dir / "status.json").stat().st_mtime
    except FileNotFoundError:
        return math.inf


def _read(kind: type[_Kind], path: Path) -> _Kind | None:
    """Return what is in a file; None if it cannot be read or holds something else."""
    try:
        return read(kind, path.read_bytes())
    except (OSError, Malformed):
        return None
