"""Open files: every running rollout holds connections or pipes, and the usual limit is soon reached."""

from __future__ import annotations

from insitu.errors import InvalidRequest
from insitu.system.open_files import allow_open_files

_FILES_PER_ROLLOUT = 2
"""The agent's connection, and at the end one to read its calls."""
_OTHER_FILES = 100


def check_open_files(max_concurrency: int) -> None:
    """Raise this process's limit as far as allowed; reject a concurrency that still exceeds it."""
    allowed, needed = allow_open_files(), _FILES_PER_ROLLOUT * max_concurrency + _OTHER_FILES
    if allowed < needed:
        fitting = max(1, (allowed - _OTHER_FILES) // _FILES_PER_ROLLOUT)
        raise InvalidRequest(
            f"eval.general.max_concurrency is {max_concurrency}: that many rollouts at once need about "
            f"{needed} open files, but this process may open only {allowed}",
            hint=f"raise the limit (`ulimit -n {needed}`, up to the hard limit `ulimit -Hn`), or use "
            f"-o eval.general.max_concurrency {fitting}",
        )
