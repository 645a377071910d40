"""A question to a process of its own: it reads every module fresh, and can be ended whatever it does.

insitu view ──► python -m insitu.harness.trial.<module>   request on stdin, answer on stdout
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from typing import TypeVar

from pydantic import BaseModel, ConfigDict

from insitu.errors import ChildFailed, DeadlineExceeded, one_line

_MAX_SHOWN_CHARS = 500


class ChildRequest(BaseModel):
    """Base of every question."""

    model_config = ConfigDict(frozen=True)

    seconds: float
    """Time limit of the whole process."""


Request = TypeVar("Request", bound=ChildRequest)
Reply = TypeVar("Reply", bound=BaseModel)


def ask(module: str, request: ChildRequest, reply: type[Reply], *, late: str, by_hand: str) -> Reply:
    """Ask a module of this package; raise InsituError if it fails, or has not answered in time.

    `late` names what took too long, `by_hand` the next thing to try in either case.
    """
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}  # also the user's folders stay as they are
    child = subprocess.Popen(
        # -P: files of the current directory are found by the names in the configuration alone.
        [sys.executable, "-P", "-m", f"insitu.harness.trial.{module}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    try:
        output, said = child.communicate(json.dumps(request.model_dump()).encode(), timeout=request.seconds)
    except subprocess.TimeoutExpired as error:
        raise DeadlineExceeded(f"{late} within {request.seconds:g} s", hint=by_hand) from error
    finally:
        if child.poll() is None:
            os.killpg(child.pid, 9)  # with whatever the user's code has started
            child.communicate()
    if child.returncode != 0:
        last = one_line(said.decode(errors="replace").strip().rpartition("\n")[2], _MAX_SHOWN_CHARS)
        raise ChildFailed(
            f"{module} ended with exit status {child.returncode}: {last or 'it said nothing'}", hint=by_hand
        )
    return reply.model_validate(json.loads(output))


def answer(request: type[Request], reply: Callable[[Request], Coroutine[None, None, BaseModel]]) -> None:
    """Answer one question of `ask`."""
    out = os.dup(1)
    os.dup2(2, 1)  # what the user's code prints must not mix with the answer
    asked = request.model_validate(json.loads(sys.stdin.buffer.read()))
    signal.alarm(math.ceil(asked.seconds) + 1)  # the end, also if whoever asked has gone
    answered = asyncio.run(reply(asked))
    with os.fdopen(out, "wb") as file:
        file.write(json.dumps(answered.model_dump()).encode())
