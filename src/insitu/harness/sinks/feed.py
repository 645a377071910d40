"""SinkFeed: the thread of one sink. It takes what the run offers, and never makes the run wait.

    the run ─► offer ─► bounded queue ─► thread ─► product
                 └─ full: dropped, counted by reason

Figures that an earlier process could not send come first. The run directory keeps how many were sent, so that
none is sent twice.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from insitu.errors import describe
from insitu.harness.sinks.sink import Figures, RunStart, SentRollout, Sink
from insitu.json_values import as_object, parse_json
from insitu.system.durable import write_atomic

MAX_QUEUED = 4096
_ROLLOUTS_AT_ONCE = 64
_MAX_REASONS = 20
Item = Figures | SentRollout


@dataclass(frozen=True, slots=True)
class SinkState:
    """The part of a run that a product has."""

    known_as: str | None = None
    num_figures: int = 0
    """All figures before this number are there, or lost."""


class SinkFeed:
    """One sink and its thread; the methods without underscore are for the run's thread."""

    def __init__(self, name: str, sink: Sink, state_file: Path, run: RunStart) -> None:
        self.name = name
        self.num_figures = 0
        self.num_rollouts = 0
        self.takes_rollouts = sink.takes_rollouts
        self._sink, self._state_file, self._run = sink, state_file, run
        self._state = _read_state(state_file, run.run_id)
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._dropped: Counter[str] = Counter()
        self._said: set[str] = set()
        self._outcome: str | None = None
        self._given_up = False
        self._thread = threading.Thread(target=self._work, name=f"sink-{name}", daemon=True)

    @property
    def known_as(self) -> str | None:
        """The product's id of the run."""
        return self._state.known_as

    def start(self, history: Sequence[Figures]) -> None:
        """Begin, with the figures of `history` that were not sent yet."""
        self._items.extend(each for each in history if each.number >= self._state.num_figures)
        self._thread.start()

    def offer(self, item: Item) -> None:
        """Queue figures or a rollout, or drop them; never wait."""
        with self._changed:
            if len(self._items) < MAX_QUEUED:
                self._items.append(item)
                self._changed.notify()
            else:
                self._drop("it could not keep up", 1)

    def new_troubles(self) -> list[str]:
        """Return the reasons for losses that were not returned before."""
        found = [reason for reason in self.dropped() if reason not in self._said]
        self._said.update(found)
        return found

    def dropped(self) -> dict[str, int]:
        """Return the number of lost figures and rollouts by reason."""
        with self._changed:
            return dict(self._dropped)

    def end(self, outcome: str) -> None:
        """Let the thread end once everything queued is sent; `join` waits for it."""
        with self._changed:
            self._outcome = outcome
            self._changed.notify()

    def join(self, deadline: float) -> None:
        """Wait until `deadline` (monotonic); what is not sent by then is dropped."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            with self._changed:
                self._given_up = True
                self._drop("it did not answer in time at the end", max(1, len(self._items)))
                self._items.clear()

    def _drop(self, reason: str, count: int) -> None:
        known = reason in self._dropped or len(self._dropped) < _MAX_REASONS
        self._dropped[reason if known else "other errors"] += count

    def _work(self) -> None:
        if not self._try(self._open, 0, "it could not be opened"):
            reason = next(iter(self._dropped))
            while items := self._next():
                with self._changed:
                    self._drop(reason, len(items))
            return
        while items := self._next():
            figures = [item for item in items if isinstance(item, Figures)]
            for each in figures:
                self._try(lambda each=each: self._send(each), 1)
            rollouts = [item for item in items if isinstance(item, SentRollout)]
            if rollouts and self._try(lambda sent=rollouts: self._sink.rollouts(sent), len(rollouts)):
                self.num_rollouts += len(rollouts)
        if not self._given_up:
            self._try(lambda: self._sink.end(self._outcome or "failed"), 0, "it could not be closed")

    def _send(self, figures: Figures) -> None:
        self._sink.figures(figures)
        self.num_figures += 1
        self._write_state(replace(self._state, num_figures=figures.number + 1))

    def _open(self) -> None:
        run = replace(self._run, known_as=self._state.known_as)
        self._write_state(replace(self._state, known_as=self._sink.start(run)))

    def _next(self) -> list[Item]:
        """Wait for figures, or for some rollouts in a row; nothing: the run is over and all is sent."""
        with self._changed:
            while not self._items and self._outcome is None:
                self._changed.wait()  # `end` comes, whatever happens to the run
            taken: list[Item] = []
            while self._items and len(taken) < _ROLLOUTS_AT_ONCE:
                if taken and isinstance(self._items[0], Figures):
                    break
                taken.append(self._items.popleft())
                if isinstance(taken[0], Figures):
                    break
            return taken

    def _try(self, call: Callable[[], None], count: int, what: str = "") -> bool:
        """Run code of the sink; if it raises, `count` items are lost for that reason."""
        try:
            call()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a library of others; the run goes on
            reason = f"{what}: {describe(error)}" if what else describe(error)
            with self._changed:
                self._drop(reason, count)
            return False
        return True

    def _write_state(self, state: SinkState) -> None:
        self._state = state
        if self._given_up:
            return  # the run has left its directory
        content = {"run_id": self._run.run_id, "id": state.known_as, "num_figures": state.num_figures}
        write_atomic(self._state_file, orjson.dumps(content))


def _read_state(file: Path, run_id: str) -> SinkState:
    """Read how far an earlier process got; another run's file says nothing."""
    found = as_object(parse_json(file.read_bytes())) if file.exists() else None
    if found is None or found.get("run_id") != run_id:
        return SinkState()
    known_as, number = found.get("id"), found.get("num_figures")
    return SinkState(
        known_as if isinstance(known_as, str) else None, number if isinstance(number, int) else 0
    )
