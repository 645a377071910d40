"""UserTraceback: where the user's own code raised, in full for a file and in its own frames for a screen."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from insitu.errors import describe, members_of, one_line

_INSITU = str(Path(__file__).parent)
_LIBRARIES = tuple(dict.fromkeys(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")))
_INSTALLED = ("/site-packages/", "/dist-packages/")
_MAX_CHARS = 20_000
_MAX_LINKS = 20
_MAX_SOURCE_CHARS = 200
_SHOWN_FRAMES = 4


@dataclass(frozen=True, slots=True)
class UserTraceback:
    """The traceback of an agent, a reward or a dataset function."""

    text: str
    """All of it, as Python prints it, from the first frame outside insitu."""
    error: str
    """Type and message, in one line."""
    frames: Sequence[str] = ()
    """The frames of the user's own files, outermost first: `agent.py:12 in answer: return row["tool"]`."""

    @property
    def cause(self) -> tuple[str, str]:
        """The type of the error and the line that raised it, by which failures are grouped."""
        return self.error.partition(":")[0], self.frames[-1] if self.frames else self.error

    @property
    def shown(self) -> list[str]:
        """The innermost frames, for a screen."""
        return list(self.frames[-_SHOWN_FRAMES:])


def user_traceback(error: BaseException) -> UserTraceback | None:
    """Return the traceback of an exception; None if no frame outside insitu took part in it."""
    links = list(_links(error))
    if not any(_outside(frame) for link in links for frame in _stack(link)):
        return None
    own = next((found for link in links if (found := _own_frames(link))), list[str]())
    return UserTraceback(_text(error), describe(error), own)


def with_frames(message: str, error: BaseException) -> str:
    """Append the user's own frames to the message of an error that ends a command."""
    found = user_traceback(error)
    return message if found is None else "\n    ".join([message, *found.shown])


def frames_on_loop(thread_id: int) -> list[str]:
    """Return the user's own frames in the callback that an event loop's thread runs now, outermost first.

    Empty if there are none, and while a module is imported: that happens once.
    """
    frame = sys._current_frames().get(thread_id)  # pyright: ignore[reportPrivateUsage]
    stack = [] if frame is None else list(traceback.extract_stack(frame))
    runs = [at for at, each in enumerate(stack) if each.filename.endswith("asyncio/events.py")]
    inside = stack[runs[-1] + 1 :] if runs else []
    if any(each.filename.startswith("<frozen importlib") for each in inside):
        return []
    return [_shown(each) for each in inside if _own(each)]


def _text(error: BaseException) -> str:
    written = traceback.TracebackException.from_exception(error, compact=True)
    kept = next((at for at, frame in enumerate(written.stack) if _outside(frame)), 0)
    del written.stack[:kept]
    text = "".join(written.format()).rstrip()
    if len(text) <= _MAX_CHARS:
        return text
    half = _MAX_CHARS // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters …\n{text[-half:]}"


def _links(error: BaseException) -> Iterator[BaseException]:
    """Yield the first member of each group, then its causes; at most a few, since chains may be circular."""
    link: BaseException | None = error
    for _ in range(_MAX_LINKS):
        if link is None:
            return
        yield link
        members = members_of(link)
        link = members[0] if members else link.__cause__ or link.__context__


def _stack(error: BaseException) -> traceback.StackSummary:
    return traceback.extract_tb(error.__traceback__)


def _own_frames(error: BaseException) -> list[str]:
    return [_shown(frame) for frame in _stack(error) if _own(frame)]


def _outside(frame: traceback.FrameSummary) -> bool:
    return not frame.filename.startswith(_INSITU)


def _own(frame: traceback.FrameSummary) -> bool:
    """Return True for the user's files: not insitu, no installed package, no part of Python."""
    name = frame.filename
    if not _outside(frame) or name.startswith("<") or any(part in name for part in _INSTALLED):
        return False
    return not name.startswith(tuple(f"{place}/" for place in _LIBRARIES if place))


def _shown(frame: traceback.FrameSummary) -> str:
    path = Path(frame.filename)
    here = Path.cwd()
    place = path.relative_to(here) if path.is_relative_to(here) else path
    source = one_line(frame.line or "", _MAX_SOURCE_CHARS)
    where = f"{place}:{frame.lineno} in {frame.name}"
    return f"{where}: {source}" if source else where
