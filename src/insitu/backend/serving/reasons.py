"""The reason for which a job or a run has failed, as its row in the ledger gives it."""

from __future__ import annotations

from insitu.errors import InsituError, describe


def reason_of(error: Exception) -> str:
    """Return an error of ours with its hint, and of the system as it is; point to the log for any other."""
    if isinstance(error, InsituError | OSError):
        return str(error)
    return f"{describe(error)} (the supervisor's log has the details)"


def first_line(reason: str) -> str:
    """Return the part of a reason that fits into a line of the terminal."""
    return reason.partition("\n")[0]
