"""JudgedRollout: the rollout that is being scored, so that a judge's calls can be recorded under it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from insitu.wire.headers import FUNCTION_HEADER, ROLLOUT_HEADER

EVALUATOR_FUNCTION = "<evaluator>"
"""Function name of a judge's calls: they are recorded with the rollout and never trained on."""

_judged: ContextVar[JudgedRollout | None] = ContextVar("insitu_judged_rollout", default=None)


@dataclass(slots=True)
class JudgedRollout:
    """One rollout while its reward is computed."""

    rollout_id: str
    is_gateway: Callable[[str], bool]
    """True for the base URL of the gateway that records the rollout; calls elsewhere are not marked."""
    num_asked: int = 0
    """Number of calls that judges have made under it."""

    def headers(self, base_url: str) -> dict[str, str]:
        """Return headers that mark a judge's call as the rollout's; none if its model is served elsewhere."""
        if not self.is_gateway(base_url):
            return {}
        self.num_asked += 1
        return {ROLLOUT_HEADER: self.rollout_id, FUNCTION_HEADER: EVALUATOR_FUNCTION}


def judged_rollout() -> JudgedRollout | None:
    """Return the rollout that the calling code scores; None for a whole group, or outside of scoring."""
    return _judged.get()


@contextmanager
def judging(rollout: JudgedRollout) -> Generator[JudgedRollout]:
    """Make `judged_rollout()` return `rollout` inside the block."""
    token = _judged.set(rollout)
    try:
        yield rollout
    finally:
        _judged.reset(token)
