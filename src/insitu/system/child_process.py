"""One child process of an agent or a reward: feeds it, bounds its output, ends its whole process group."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from typing import cast

from insitu.system.tasks import finish

MAX_STDOUT_BYTES = 1024 * 1024
MAX_STDERR_BYTES = 8_000
TERM_SECONDS = 2.0
_KILL_SECONDS = 5.0
_DRAIN_SECONDS = 1.0


class ChildProcess(asyncio.SubprocessProtocol):
    """Runs once. Not `asyncio.subprocess`, because its `wait` also waits for whoever holds the pipes."""

    def __init__(self) -> None:
        self.stdout = bytearray()
        self.stderr = bytearray()
        self.overflowed = False
        self.returncode: int | None = None
        self._transport: asyncio.SubprocessTransport | None = None
        self._exited = asyncio.Event()
        self._stopped = asyncio.Event()
        """Set when it exits or writes too much."""
        self._closed = asyncio.Event()

    async def run(
        self, command: Sequence[str], stdin: bytes | None, cwd: str, env: Mapping[str, str]
    ) -> None:
        """Run the command to its end. Leaves nothing of its process group behind, even when cancelled."""
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        start = asyncio.get_running_loop().subprocess_exec(
            lambda: self,
            *command,
            stdin=null if stdin is None else pipe,
            stdout=pipe,
            stderr=pipe,
            cwd=cwd,
            env=dict(env),
            start_new_session=True,
        )
        try:
            await finish(start)  # not cancelled half-way, so that a started process is always ended
            if stdin is not None:
                self._feed(stdin)
            await self._stopped.wait()
        finally:
            await finish(self._end())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.SubprocessTransport, transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 2:
            self.stderr += data
            del self.stderr[:-MAX_STDERR_BYTES]
        elif len(self.stdout) + len(data) > MAX_STDOUT_BYTES:
            self.overflowed = True
            self._stopped.set()
        else:
            self.stdout += data

    def process_exited(self) -> None:
        self._exited.set()
        self._stopped.set()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the interface's own
        self._closed.set()

    def _feed(self, data: bytes) -> None:
        assert self._transport is not None
        stdin = cast(asyncio.WriteTransport | None, self._transport.get_pipe_transport(0))
        if stdin is not None:
            stdin.write(data)
            stdin.close()  # once it is written

    async def _end(self) -> None:
        if self._transport is None:  # it never started
            return
        group = self._transport.get_pid()
        if not self._exited.is_set():
            _signal(group, signal.SIGTERM)
            await _within(self._exited, TERM_SECONDS)
        _signal(group, signal.SIGKILL)
        await _within(self._exited, _KILL_SECONDS)
        # Once the group is gone, the pipes close, unless a process that left the group holds them.
        await _within(self._closed, _DRAIN_SECONDS)
        self.returncode = self._transport.get_returncode()
        self._transport.close()


def _signal(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # no process is left, or only ones that changed their user
        return


async def _within(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
