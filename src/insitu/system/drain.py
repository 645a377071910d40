"""One budget for the end of a process: what the children take is what the supervisor allows."""

from __future__ import annotations

DRAIN_SECONDS = 8.0
"""Time for the calls and requests under way to finish."""
FLUSH_SECONDS = 4.0
"""Time after that to make durable what they left."""
STOP_SECONDS = DRAIN_SECONDS + FLUSH_SECONDS + 3.0
"""Time until a child that was told to stop is killed."""
