"""Child processes that never outlive `insitu serve`.

Three safeguards: every child asks the kernel to kill it when its parent dies (`guard`), every descendant
carries a mark in its environment, and a janitor process waits for the supervisor to exit for any reason,
then kills all marked processes and removes the scratch directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from insitu.errors import Conflict, Unavailable
from insitu.system.logs import LOG_FILE

MARK = "INSITU_SERVE_ID"
"""Environment variable set on every process started by one `insitu serve`."""

_PR_SET_PDEATHSIG = 1
_GUARD = "insitu.backend.guard"
_JANITOR = "insitu.backend.janitor"


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends (Linux only)."""
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError("prctl(PR_SET_PDEATHSIG) was refused by the kernel")


def guarded(command: Sequence[str]) -> list[str]:
    """Return the command under the guard, which lets the kernel kill it when this process dies."""
    return [sys.executable, "-m", _GUARD, str(os.getpid()), *command]


def spawn(
    command: Sequence[str], log_path: Path, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start `command` in its own session under the guard, with its output appended to `log_path`.

    The guard runs in the child before the command, so no code runs between fork and exec in this process.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        return subprocess.Popen(
            guarded(command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {}), LOG_FILE: str(log_path)},
            start_new_session=True,
        )


def start_janitor(serve_id: str, scratch: Path) -> subprocess.Popen[bytes]:
    """Start the process that cleans up if the supervisor cannot."""
    return subprocess.Popen(
        [sys.executable, "-m", _JANITOR, serve_id, str(scratch)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def marked(serve_id: str) -> Iterator[psutil.Process]:
    """Yield all live processes marked with `serve_id`, except this one."""
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == serve_id:
                yield process
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue


def end_marked(serve_id: str, deadline_seconds: float, keep: frozenset[int] = frozenset()) -> list[int]:
    """Kill the marked processes until none is left; return the ids of those still alive at the deadline."""
    deadline = time.monotonic() + deadline_seconds
    while True:
        left = [process for process in marked(serve_id) if process.pid not in keep]
        if not left or time.monotonic() > deadline:
            return [process.pid for process in left]
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=0.5)


def end_child(child: subprocess.Popen[bytes], grace_seconds: float) -> int:
    """Terminate a child, then kill it with everything left in its process group; return its exit code."""
    if child.poll() is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):  # grace period over; the group is killed below
            child.wait(grace_seconds)
    with contextlib.suppress(ProcessLookupError):  # the whole group has already exited
        os.killpg(child.pid, signal.SIGKILL)
    return child.wait(grace_seconds)


def remove_tree(path: Path) -> None:
    """Delete a directory that dying processes may still be writing to."""
    for _ in range(20):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
        time.sleep(0.1)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port that is free now; the caller binds it at once."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def bind(host: str, port: int, option: str = "--port") -> socket.socket:
    """Return a bound socket, or raise Unavailable with the reason and the option that names another port."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise Unavailable(
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            hint=f"end what listens there (ss -ltnp 'sport = :{port}'), or pass another {option}",
        ) from error
    return sock


def lock_directory(directory: Path) -> IO[str]:
    """Lock a state directory for one supervisor; the kernel releases it however this process ends."""
    lock = (directory / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise Conflict(
            f"another `insitu serve` uses the state directory {directory}",
            hint="stop it, or pass another --state-dir",
        ) from error
    return lock


def tail(path: Path, num_lines: int = 15) -> str:
    """Return the last lines of a log, for an error message."""
    if not path.exists():
        return f"(no log at {path})"
    with path.open("rb") as log:
        log.seek(0, os.SEEK_END)
        log.seek(max(0, log.tell() - 16_384))
        lines = log.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-num_lines:])
