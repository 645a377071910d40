"""Run as a script: lower this process's limits, then become the program. Imports nothing of insitu.

    python -I -S limited.py CPU=10,AS=2147483648 program argument …

Limits set between fork and exec of a process with threads could deadlock it, so this runs after an exec.
"""

from __future__ import annotations

import os
import resource
import signal
import sys


def main(limits: str, command: list[str]) -> None:
    """Set each limit and run the program instead of this one."""
    for limit in limits.split(","):
        name, _, text = limit.partition("=")
        value = int(text)
        # One second between the two: SIGXCPU at the first says why, SIGKILL at the second ends it.
        hard = value + 1 if name == "CPU" else value
        kind = getattr(resource, f"RLIMIT_{name}")
        allowed = resource.getrlimit(kind)[1]
        if allowed != resource.RLIM_INFINITY:
            value, hard = min(value, allowed), min(hard, allowed)
        resource.setrlimit(kind, (value, hard))
    for name in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python, and by every program it becomes
        signal.signal(name, signal.SIG_DFL)
    os.execvp(command[0], command)  # noqa: S606 - without a shell, on purpose


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
