"""A recorded call without its tokens and messages."""

from __future__ import annotations

from typing import NamedTuple


class CallHead(NamedTuple):
    """Whose call it was and how it ended."""

    rollout_id: str | None
    run: str | None
    finish_reason: str
    started_at: float
