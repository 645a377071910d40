"""The limit on this process's open files and connections."""

from __future__ import annotations

import resource

WANTED = 65_536


def allow_open_files(wanted: int = WANTED) -> int:
    """Raise the soft limit towards `wanted` as far as the hard limit allows; return the limit in force.

    The usual soft limit is 1,024, and every call of an agent takes a connection or two.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    most = wanted if hard == unlimited else min(wanted, hard)
    if soft == unlimited or soft >= most:
        return wanted if soft == unlimited else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most
