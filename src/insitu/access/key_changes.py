"""Create and revoke keys, one process at a time."""

from __future__ import annotations

import fcntl
import os
import secrets
import shlex
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from insitu.access.audit_log import AUDIT_FILE, HERE, AuditLog
from insitu.access.key_file import KEYS_FILE, MAX_KEYS, StoredKey, read_keys, write_keys
from insitu.access.key_limits import KeyLimits
from insitu.access.scopes import Scope
from insitu.errors import Conflict, DeadlineExceeded, InvalidRequest, NotFound, Unavailable
from insitu.system.durable import make_directories
from insitu.system.keys import hash_key
from insitu.types import NAME_PATTERN

PREFIX = "insitu_"
"""The start of every created key: scanners of secrets can find it."""
_SECRET_BYTES = 32
_KEPT_SECONDS = 30 * 86_400.0
"""An ended key is forgotten after this time, at the next change."""
_LOCK_FILE = "keys.lock"
_LOCK_SECONDS = 10.0
_LOCK_AGAIN_SECONDS = 0.05


def create_key(
    state_dir: Path,
    name: str,
    scopes: Sequence[Scope],
    lifetime_seconds: float | None = None,
    limits: KeyLimits | None = None,
    *,
    project: str | None = None,
) -> tuple[str, StoredKey]:
    """Create a key; return it, which nothing else ever does, and its stored form."""
    if not NAME_PATTERN.fullmatch(name):
        raise InvalidRequest(f"key name {name!r} does not match {NAME_PATTERN.pattern}")
    if project is not None and not NAME_PATTERN.fullmatch(project):
        raise InvalidRequest(f"project name {project!r} does not match {NAME_PATTERN.pattern}")
    with _disk_errors(state_dir):
        make_directories(state_dir)
    with _changing(state_dir) as keys:
        now = time.time()
        if any(key.name == name and key.state(now) == "active" for key in keys):
            raise Conflict(
                f"there is a key named {name!r}",
                hint=f"choose another name, or: insitu keys revoke {name} --state-dir {_quoted(state_dir)}",
            )
        if len(keys) >= MAX_KEYS:
            raise Conflict(
                f"{state_dir / KEYS_FILE} holds {MAX_KEYS} keys, which is the most",
                hint=f"revoke some with `insitu keys revoke NAME --state-dir {_quoted(state_dir)}`; ended "
                "keys are forgotten after 30 days",
            )
        # The hash of 256 random bits cannot be reversed by guessing, so it needs neither salt nor a slow
        # function, which every request would pay for.
        secret = PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
        expires_at = None if lifetime_seconds is None else now + lifetime_seconds
        granted = [scope for scope in Scope if scope in scopes]
        stored = StoredKey(
            name,
            hash_key(secret).hex(),
            granted,
            now,
            expires_at,
            limits=limits or KeyLimits(),
            project=project,
        )
        bounds = f" ({limits})" if limits is not None and str(limits) else ""
        _note(state_dir, f"keys create {name} {','.join(granted)}{bounds}", project)
        keys.append(stored)
    return secret, stored


def revoke_key(state_dir: Path, name: str) -> StoredKey:
    """Revoke the key of that name, also an expired one. Repeating it is harmless."""
    if not state_dir.is_dir():
        raise _unknown(state_dir, name, [])
    with _changing(state_dir) as keys:
        found = [place for place, key in enumerate(keys) if key.name == name]
        if not found:
            raise _unknown(state_dir, name, keys)
        # Earlier keys of the name have ended, or the last one could not have been created.
        place = found[-1]
        if keys[place].revoked_at is None:
            _note(state_dir, f"keys revoke {name}", keys[place].project)
            keys[place] = replace(keys[place], revoked_at=time.time())
        return keys[place]


@contextmanager
def _changing(state_dir: Path) -> Generator[list[StoredKey]]:
    """Yield the keys under a lock and write them afterwards, without those that ended long ago."""
    path = state_dir / KEYS_FILE
    with _disk_errors(state_dir):
        _check_owner(state_dir)
        with _locked(state_dir / _LOCK_FILE):
            oldest = time.time() - _KEPT_SECONDS
            before = read_keys(path)
            keys = [key for key in before if key.ended_at(oldest) is None]
            yield keys
            if keys != before:
                write_keys(path, keys)


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def _note(state_dir: Path, change: str, project: str | None) -> None:
    AuditLog(state_dir / AUDIT_FILE).note(f"user {os.geteuid()}", change, HERE, project)


@contextmanager
def _disk_errors(state_dir: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise Unavailable(
            f"{state_dir}: keys cannot be stored there: {error.strerror}",
            hint="pass the --state-dir of `insitu serve`, or let this user write there",
        ) from error


@contextmanager
def _locked(path: Path) -> Generator[None]:
    deadline = time.monotonic() + _LOCK_SECONDS
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"another `insitu keys` has held {path} for {_LOCK_SECONDS:.0f} s", hint="retry later"
                    ) from error
                time.sleep(_LOCK_AGAIN_SECONDS)
        yield
    finally:
        os.close(descriptor)  # releases the lock


def _check_owner(state_dir: Path) -> None:
    """Reject a directory of somebody else: its backend could not read a file that only we may read."""
    owner = state_dir.stat().st_uid
    if owner != os.geteuid():
        raise InvalidRequest(
            f"{state_dir} belongs to the user with id {owner}, who alone may read its keys",
            hint=f"run the command as that user: sudo -u '#{owner}' insitu keys …",
        )


def _unknown(state_dir: Path, name: str, keys: Sequence[StoredKey]) -> NotFound:
    names = ", ".join(dict.fromkeys(key.name for key in keys)) or "none"
    return NotFound(
        f"no key is named {name!r} in {state_dir / KEYS_FILE}; it has: {names}",
        hint="pass the --state-dir of `insitu serve`",
    )
