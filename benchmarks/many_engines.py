"""Many stand-in engines in one process, for the benchmarks of several gateways.

    python benchmarks/many_engines.py --count 50 [--gated] --root TOKENIZER

Prints their ports as one line of JSON and ends when stdin is closed. With --gated, no generation ends before
a line has come on stdin; then those that waited end one after the other, so many a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from insitu.system.open_files import allow_open_files
from tests.support.standin_engine import Behaviour, StandinEngine

ENDS_PER_SECOND = 50.0


class PacedGate(asyncio.Event):
    """A gate that lets one generation after the other end once it is open."""

    def __init__(self) -> None:
        super().__init__()
        self._turn = asyncio.Lock()

    async def wait(self) -> Literal[True]:
        await super().wait()
        async with self._turn:
            await asyncio.sleep(1 / ENDS_PER_SECOND)
        return True


async def serve(count: int, gated: bool, behaviour: Behaviour) -> None:
    if gated:
        behaviour.gate = PacedGate()
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(StandinEngine(behaviour, keep_seen=False)) for _ in range(count)
        ]
        print(json.dumps([engine.port for engine in engines]), flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            if behaviour.gate is not None:
                behaviour.gate.set()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--gated", action="store_true")
    parser.add_argument(
        "--seconds",
        type=float,
        nargs=2,
        default=(0.0, 0.0),
        help="the least and the most time of a generation",
    )
    parser.add_argument("--tokens", type=int, default=200, help="of an answer")
    parser.add_argument(
        "--root", required=True, help="the directory of a tokenizer that write_tokenizer wrote"
    )
    given = parser.parse_args()
    allow_open_files()
    behaviour = Behaviour(
        delay_seconds=tuple(given.seconds),
        texts=["x" * given.tokens],
        root=given.root,
        keeps_interval=True,
    )
    asyncio.run(serve(given.count, given.gated, behaviour))


if __name__ == "__main__":
    main()
