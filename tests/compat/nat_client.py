"""`nat finetune`, unmodified, as a process of its own environment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.compat.environment import NAT

GATEWAY_PORT = 8000
"""The client's health check knows no other."""
_CONFIG = NAT.plugin / "config.yml" if NAT.plugin is not None else Path()


@dataclass
class NatClient:
    """One call of `nat finetune` in a directory of its own."""

    directory: Path
    api_port: int
    run: str = "compat"
    key: str = "default"
    base_model: str = "tiny"
    num_examples: int = 4
    overrides: dict[str, str] = field(default_factory=dict)
    """Values of the configuration by their path, as `nat finetune --override` takes them."""

    @property
    def output(self) -> Path:
        return self.directory / "client.log"

    def epochs(self) -> list[dict[str, Any]]:
        """What the client itself says of its epochs."""
        lines = (self.directory / "output" / "training_metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def said(self) -> str:
        return self.output.read_text()

    def _prepare(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        generator = random.Random(0)
        pairs = [(generator.randint(1, 9), generator.randint(1, 9)) for _ in range(self.num_examples)]
        questions = [
            {
                "id": str(number),
                "question": f"What is {a} + {b}? Reply with the number only.",
                "answer": str(a + b),
            }
            for number, (a, b) in enumerate(pairs)
        ]
        (self.directory / "questions.json").write_text(json.dumps(questions))
        config = yaml.safe_load(_CONFIG.read_text())
        for path, value in self.overrides.items():
            *parents, last = path.split(".")
            place = config
            for name in parents:
                place = place[name]
            place[last] = value
        (self.directory / "config.yml").write_text(yaml.safe_dump(config))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.subprocess.Process]:
        """The process; it and its children are gone afterwards."""
        self._prepare()
        names = {
            "RUN_NAME": self.run,
            "GATEWAY_PORT": str(GATEWAY_PORT),
            "API_PORT": str(self.api_port),
            "INSITU_KEY": self.key,
            "BASE_MODEL": self.base_model,
        }
        with self.output.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                NAT.program("nat"),
                *("--log-level", "WARNING"),  # at INFO this release recurses into its own log handler
                *("finetune", "--config_file", "config.yml"),
                cwd=self.directory,
                env=NAT.variables(self.directory) | names,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
            try:
                yield process
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()

    async def finetune(self, seconds: float = 300.0) -> int:
        """Run it to its end; its exit code."""
        async with self.running() as process, asyncio.timeout(seconds):
            return await process.wait()
