"""Commands: the two that the demo runs, as a user would type them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MODEL_NAME = "smollm2"
CONFIG_FILE = "config.yml"
RUN_NAME = "adder"
"""As the demo's configuration names it."""
_STATE = "state"
_SMALL = ("--max-seq-length", "512", "--max-num-seqs", "64")
"""Short sequences leave memory for everything else on the machine."""


@dataclass(frozen=True, slots=True)
class Commands:
    """`insitu serve` and `insitu finetune` with the demo's folder and ports."""

    model: Path
    folder: Path
    port: int
    gateway_port: int

    @property
    def serve(self) -> list[str]:
        """The backend."""
        ports = ["--port", str(self.port), "--gateway-port", str(self.gateway_port)]
        model = ["--model", str(self.model), "--model-name", MODEL_NAME]
        return ["serve", *model, "--state-dir", str(self.folder / _STATE), *ports, *_SMALL]

    def finetune(self, overrides: Sequence[tuple[str, str]] = ()) -> list[str]:
        """The training, run in the folder; it also measures the model before and after."""
        own = [
            ("model.base_url", f"http://127.0.0.1:{self.gateway_port}/v1"),
            ("backend.port", str(self.port)),
        ]
        flags = [part for path, value in (*own, *overrides) for part in ("-o", path, value)]
        return ["finetune", f"--config_file={CONFIG_FILE}", "--validation_samples=4", *flags]


def as_typed(command: Sequence[str]) -> str:
    """Return a command of insitu as it is typed in a shell."""
    return shlex.join(["insitu", *command])
