"""Phases: the current work of `insitu serve`, announced when it begins and repeated while it takes long.

A thread repeats it, because some phases (imports, Ray) block the event loop::

       0 s  checking the model smollm2
       4 s  starting the engine (vLLM)
      19 s  still starting the engine (vLLM), 15 s
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

Say = Callable[[str], None]
Detail = Callable[[], str]

_BEAT_SECONDS = 15.0
_LONG_SECONDS = 120.0
_LONG_BEAT_SECONDS = 60.0
"""Interval for a phase that has lasted `_LONG_SECONDS`: a download, or a large step."""
_SHORT_SECONDS = 1.0
"""A phase that took less needs no line at its end."""
_TICK_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class _Phase:
    name: str
    began: float
    said: float
    detail: Detail | None


class Phases:
    """The phases under way. Lines carry the seconds since the start, and the time of day once it is ready."""

    def __init__(self, say: Say, clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._began = clock()
        self._ready = False
        self._lock = threading.Lock()
        self._under_way: list[_Phase] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="phases", daemon=True)

    def __enter__(self) -> Phases:
        """Begin to repeat what takes long."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._began

    @contextmanager
    def phase(self, name: str, detail: Detail | None = None, *, quiet: bool = False) -> Generator[None]:
        """Announce this phase, and its duration once it succeeds.

        `detail` adds what is known now to a repetition. A `quiet` phase is only repeated.
        """
        if not quiet:
            self.say(name)
        now = self._clock()
        phase = _Phase(name, now, now, detail)
        with self._lock:
            self._under_way.append(phase)
        try:
            yield
        finally:
            with self._lock:
                self._under_way.remove(phase)
        took = self._clock() - phase.began
        if not quiet and took >= _SHORT_SECONDS:
            self.say(f"{name}: done in {took:.0f} s")

    def say(self, text: str) -> None:
        """Print a line with its time."""
        self._say(f"{time.strftime('%H:%M:%S') if self._ready else f'{self.seconds:4.0f} s'}  {text}")

    def ready(self) -> None:
        """End the start: later lines carry the time of day."""
        self._ready = True

    def beat(self) -> None:
        """Repeat the phases for which it is time."""
        for phase in self._due():
            known = phase.detail() if phase.detail is not None else ""
            lasting = f"still {phase.name}, {self._clock() - phase.began:.0f} s"
            self.say(f"{lasting}: {known}" if known else lasting)

    def _due(self) -> list[_Phase]:
        now = self._clock()
        with self._lock:
            due = [phase for phase in self._under_way if now - phase.said >= _interval(now - phase.began)]
            for phase in due:
                phase.said = now
        return due

    def _repeat(self) -> None:
        while not self._stop.wait(_TICK_SECONDS):
            self.beat()


def _interval(seconds: float) -> float:
    return _BEAT_SECONDS if seconds < _LONG_SECONDS else _LONG_BEAT_SECONDS


SILENT = Phases(lambda _line: None)
"""For parts that run without a terminal."""
