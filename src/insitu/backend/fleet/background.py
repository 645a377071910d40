"""Run a process on the time that others leave it.

An engine that is started again beside working ones takes a core for half a minute. On a machine without a
GPU, that is a core which the trainer and the other engines compute on.
"""

from __future__ import annotations

import logging
import os
import resource
from pathlib import Path

_LOWEST = 19
_CAP_SYS_NICE = 1 << 23
_UNPRIVILEGED = 20
"""A limit of RLIMIT_NICE from which on a process may return to the usual priority."""
log = logging.getLogger(__name__)


def to_background(session: int) -> None:
    """Lower the priority of a session's processes, by those means that `to_foreground` can undo."""
    _set(session, _LOWEST)


def to_foreground(session: int) -> None:
    """Give a session's processes the priority of this one."""
    _set(session, os.getpriority(os.PRIO_PROCESS, 0))


def _set(session: int, nice: int) -> None:
    """Set the niceness of a session among sessions, if Linux groups by them, and of its processes.

    Where the scheduler groups by session, a process's own niceness counts only within its session.
    """
    group = Path(f"/proc/{session}/autogroup")
    try:
        if group.exists():
            group.write_text(str(nice))
        if _may_raise():
            os.setpriority(os.PRIO_PGRP, session, nice)
    except OSError as error:
        log.warning("the priority of the processes of session %d stays as it is: %s", session, error)


def _may_raise() -> bool:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    capabilities = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    limit, _ = resource.getrlimit(resource.RLIMIT_NICE)
    unprivileged = limit == resource.RLIM_INFINITY or limit >= _UNPRIVILEGED
    return unprivileged or bool(int(capabilities, 16) & _CAP_SYS_NICE)
