"""Figures: the progress of a run in numbers, counted from the events that the loop reports."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock

from insitu.harness.interfaces.progress import Progress
from insitu.types import SCORED, Ending

_WINDOW_SECONDS = 10.0
_MAX_WINDOW_SECONDS = 600
_RECENT_ROLLOUTS = 64
_RECENT_EPOCHS = 5
_RECENT_STEPS = 6


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """Progress of a phase of rollouts."""

    name: str
    total: int
    kept: int
    """Done in an earlier, interrupted run; counted in `done`, but not in the other figures."""
    done: int
    running: int
    failures: Mapping[Ending, int]
    reward: float | None
    """Mean over the rollouts that have a reward."""
    seconds: float
    num_output_tokens: int
    tokens_per_second: float | None
    """Recent rate: over ten seconds, or over the mean duration of a rollout if that is longer."""
    seconds_left: float | None

    @property
    def num_failed(self) -> int:
        """Rollouts that ended without a result to score."""
        return sum(self.failures.values())


@dataclass(frozen=True, slots=True)
class TrainingFigures:
    """Progress of a training step."""

    phase: str
    fraction: float
    seconds: float


@dataclass(frozen=True, slots=True)
class RunFigures:
    """Progress of the run, known once an epoch has ended."""

    epochs_done: int
    num_epochs: int
    seconds_left: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All figures at one moment; None for anything inactive or not yet known."""

    phase: PhaseFigures | None
    training: TrainingFigures | None
    run: RunFigures | None
    verdict: str | None = None
    """The latest one."""
    seconds: float = 0.0
    """Since the beginning."""
    latest: str = ""
    """The latest line of the log."""


class Figures(Progress):
    """Counts the reported events. One thread reports, another reads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._lock = Lock()
        self.latest = ""
        self._phase: _Phase | None = None
        self._training: tuple[str, float, float] | None = None
        self._verdict: str | None = None
        self._epochs: tuple[int, int] | None = None
        self._epoch_seconds: list[float] = []
        self._epoch_ended_at = 0.0
        self._shares: deque[tuple[float, float]] = deque(maxlen=_RECENT_STEPS)
        """Times, and shares of the epoch that were done."""

    def phase_started(
        self,
        name: str,
        total_rollouts: int,
        done: int = 0,
        *,
        brief: bool = False,  # noqa: ARG002 - for what is shown, not counted
    ) -> None:
        with self._lock:
            self._phase = _Phase(name, total_rollouts, done, self._clock())

    def rollout_started(self) -> None:
        with self._lock:
            if self._phase is not None:
                self._phase.start()

    def rollout_ended(
        self, ending: Ending, reward: float | None, num_output_tokens: int, seconds: float
    ) -> None:
        with self._lock:
            if self._phase is not None:
                self._phase.add(ending, reward, num_output_tokens, seconds, self._clock())

    def phase_ended(self) -> None:
        with self._lock:
            self._phase = None

    def training(self, phase: str, fraction: float) -> None:
        with self._lock:
            started_at = self._training[2] if self._training else self._clock()
            self._training = (phase, min(max(fraction, 0.0), 1.0), started_at)

    def training_ended(self) -> None:
        with self._lock:
            self._training = None

    def step_ended(
        self,
        title: str,  # noqa: ARG002 - shown, not counted
        avg_reward: float | None,  # noqa: ARG002 - shown, not counted
        account_line: str,  # noqa: ARG002 - shown, not counted
        seconds: float,  # noqa: ARG002 - validations come between steps
        share: float,
    ) -> None:
        with self._lock:
            if self._shares and self._shares[-1][1] >= share:
                self._shares.clear()  # the next epoch
            self._shares.append((self._clock(), share))

    def epoch_seconds_left(self) -> float | None:
        """Estimate the rest of an epoch of several steps from the latest ones; None before the second."""
        with self._lock:
            if len(self._shares) < 2:
                return None
            (began, first), (now, last) = self._shares[0], self._shares[-1]
            return (1 - last) * (now - began) / (last - first)

    def epoch_ended(
        self,
        epoch: int,
        num_epochs: int,
        avg_reward: float | None,  # noqa: ARG002 - shown, not counted
        account_line: str,  # noqa: ARG002 - shown, not counted
        seconds: float,
    ) -> None:
        with self._lock:
            self._epochs = (epoch, num_epochs)
            self._epoch_seconds.append(seconds)
            self._epoch_ended_at = self._clock()

    def verdict(self, sentence: str, *, warning: bool) -> None:  # noqa: ARG002 - shown, not counted
        with self._lock:
            self._verdict = sentence

    def snapshot(self) -> Snapshot:
        """Return the current figures."""
        with self._lock:
            now = self._clock()
            phase = self._phase.figures(now) if self._phase else None
            training = None
            if self._training:
                name, fraction, started_at = self._training
                training = TrainingFigures(name, fraction, now - started_at)
            run = self._run_figures(now)
            return Snapshot(phase, training, run, self._verdict, now - self._began, self.latest)

    def _run_figures(self, now: float) -> RunFigures | None:
        if self._epochs is None:
            return None
        epoch, num_epochs = self._epochs
        # The first epoch of a process may contain a warm-up, or rollouts kept from an earlier start.
        recent = (self._epoch_seconds[1:] or self._epoch_seconds)[-_RECENT_EPOCHS:]
        mean = sum(recent) / len(recent)
        left = max(0.0, (num_epochs - epoch) * mean - (now - self._epoch_ended_at))
        return RunFigures(epoch, num_epochs, left)


class _Phase:
    """The counters of the current phase."""

    def __init__(self, name: str, total: int, kept: int, now: float) -> None:
        self.name = name
        self.total = total
        self.kept = kept
        self.running = 0
        self._most_running = 0
        self._started_at = now
        self._ended = 0
        self._failures: Counter[Ending] = Counter()
        self._reward_sum = 0.0
        self._num_rewards = 0
        self._tokens = 0
        self._rollout_seconds = 0.0
        self._durations: deque[float] = deque(maxlen=_RECENT_ROLLOUTS)
        self._recent: deque[tuple[int, int]] = deque(maxlen=_MAX_WINDOW_SECONDS)
        """Output tokens per whole second, so that memory does not grow with the rate of rollouts."""

    def start(self) -> None:
        self.running += 1
        self._most_running = max(self._most_running, self.running)

    def add(self, ending: Ending, reward: float | None, tokens: int, seconds: float, now: float) -> None:
        self.running = max(0, self.running - 1)
        self._ended += 1
        if ending not in SCORED:
            self._failures[ending] += 1
        if reward is not None and math.isfinite(reward):
            self._reward_sum += reward
            self._num_rewards += 1
        self._tokens += tokens
        self._rollout_seconds += seconds
        self._durations.append(seconds)
        second = int(now)
        if self._recent and self._recent[-1][0] == second:
            self._recent[-1] = (second, self._recent[-1][1] + tokens)
        else:
            self._recent.append((second, tokens))

    def figures(self, now: float) -> PhaseFigures:
        seconds = now - self._started_at
        done = self.kept + self._ended
        return PhaseFigures(
            name=self.name,
            total=self.total,
            kept=self.kept,
            done=done,
            running=self.running,
            failures=dict(self._failures),
            reward=self._reward_sum / self._num_rewards if self._num_rewards else None,
            seconds=seconds,
            num_output_tokens=self._tokens,
            tokens_per_second=self._tokens_per_second(now),
            seconds_left=self._seconds_left(self.total - done),
        )

    def _seconds_left(self, num_left: int) -> float | None:
        """Estimate from the latest rollouts, so that a slow start is forgotten once it is over."""
        if not self._durations or not self._most_running:
            return None
        mean = sum(self._durations) / len(self._durations)
        return mean * max(0, num_left) / self._most_running

    def _tokens_per_second(self, now: float) -> float | None:
        if not self._ended:
            return None
        window = max(_WINDOW_SECONDS, min(self._rollout_seconds / self._ended, _MAX_WINDOW_SECONDS))
        elapsed = now - self._started_at
        if elapsed <= window:
            return self._tokens / max(elapsed, 1.0)
        # A second belongs to the window if its midpoint does, so that the rounding errors even out.
        return sum(tokens for second, tokens in self._recent if second + 0.5 > now - window) / window
