"""Take families through the trainer and through vLLM: `python -m tests.gates.families.look [NAME …]`.

It prints a JSON line for each; without names, it takes all and writes the table that the product reads.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import insitu.training.model
from insitu.errors import InsituError
from insitu.training.model import lora
from tests.gates.families.engine_side import Served, one_process, serve
from tests.gates.families.tiny import FAMILIES, WRAPPERS, family_of
from tests.gates.families.trainer_side import Trained, examine, save_tiny

TABLE = Path(insitu.training.model.__path__[0]) / "families.json"
FIGURES = {"logprobs": 1e-5, "gradients": 3e-5, "checkpointed": 1e-5, "branches": 1e-5}
"""Every figure's bound. Float32 rounds gradients of Gemma 4's shared keys to 1e-5 of the largest."""
_NOT_TAKEN = re.compile(r"expected target modules in \{(.*?)\} but received \[(.*?)\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Seen:
    """One family on both sides."""

    family: str
    trained: Trained | None = None
    served: Served | None = None
    left_out: tuple[str, ...] = ()
    trainer_error: str = ""
    engine_error: str = ""
    seconds: float = 0.0

    @property
    def line(self) -> dict[str, Any]:
        """The family's entry in the table, with the figures that it rests on."""
        figures = None if self.trained is None else {name: getattr(self.trained, name) for name in FIGURES}
        return {"name": self.family, "figures": figures, "seconds": round(self.seconds, 1), "row": self.row}

    @property
    def row(self) -> dict[str, Any]:
        """The family's entry in the table."""
        if self.trained is None or self.served is None:
            return {"rejected": self.trainer_error or self.engine_error}
        inexact = any(getattr(self.trained, name) > bound for name, bound in FIGURES.items())
        if inexact or self.served.left_out:
            raise AssertionError(f"{self.family} is not whole: {self}")
        return {
            "engine": self.served.model,
            "hybrid": self.served.hybrid,
            "adapts": list(self.trained.layers),
            "left_out": list(self.left_out),
            "experts": self.trained.experts,
            "merged": self.trained.merged,
            "several_ranks": self.trained.in_shards,
            "shares_prompts": self.trained.shares,
        }


def look(family: str) -> Seen:
    """Take one family through both sides. Layers that vLLM rejects by name are left out."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        base = save_tiny(family, Path(folder) / "base")
        left_out: tuple[str, ...] = ()
        for attempt in ("first", "second"):
            adapter = Path(folder) / attempt
            try:
                trained = examine(base, adapter, left_out)
            except (InsituError, AttributeError, ValueError, RuntimeError) as error:
                return Seen(family, trainer_error=f"the trainer: {_line(error, base)}")
            try:
                served = serve(base, adapter, trained.layers, dummy=family_of(family) in WRAPPERS)
            except (AttributeError, KeyError, ValueError, RuntimeError) as error:
                rejected = _not_taken(str(error))
                if rejected and attempt == "first":
                    left_out = rejected
                    continue
                return Seen(family, trained, engine_error=f"vLLM: {_line(error, base)}")
            return Seen(family, trained, served, left_out, seconds=time.monotonic() - began)
    raise AssertionError("an attempt returns or is the first")


def _not_taken(message: str) -> tuple[str, ...]:
    """Return the layers that vLLM's message names as rejected."""
    found = _NOT_TAKEN.search(message)
    if found is None:
        return ()
    taken, received = (set(re.findall(r"[\w.]+", part)) for part in found.groups())
    return tuple(sorted({name.rpartition(".")[2] for name in received} - taken))


def _line(error: Exception, base: Path) -> str:
    text = error.message if isinstance(error, InsituError) else str(error)
    first = text.strip().splitlines()[0].replace(str(base), "the model")
    return first if len(first) <= 200 else f"{first[:200]} …"


def in_a_process(*arguments: str, seconds: float) -> list[dict[str, Any]]:
    """Look in a process of its own, where vLLM finds what it imports for images."""
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parent / "standin_torchvision"),
        "VLLM_LOGGING_LEVEL": "CRITICAL",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "tests.gates.families.look", "--here", *arguments]
    done = subprocess.run(command, env=environment, timeout=seconds, check=True, stdout=subprocess.PIPE)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]


def main(arguments: list[str]) -> None:
    names = [each for each in arguments if not each.startswith("-")]
    if "--here" in arguments:
        lora.families = dict  # the table must not decide what is found
        with one_process():
            for name in names:
                print(json.dumps(look(name).line), flush=True)
        return
    rows: dict[str, Any] = {}
    for line in in_a_process(*(names or sorted(FAMILIES)), seconds=3600):
        print(json.dumps(line), flush=True)
        name, row = line["name"], line["row"]
        family = family_of(name)
        rows[family] = joined(rows[family], row, name) if family in rows else row
    if not names:
        TABLE.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")


def joined(row: dict[str, Any], other: dict[str, Any], variant: str) -> dict[str, Any]:
    """Return what holds for a family and for its variant."""
    if "rejected" in other:
        return row | {"untried": f"with {variant.partition('-')[2]}: {other['rejected']}"}
    return row | {
        "adapts": sorted({*row["adapts"], *other["adapts"]}),
        "experts": row["experts"] or other["experts"],
        "merged": row["merged"] and other["merged"],
        "several_ranks": row["several_ranks"] and other["several_ranks"],
        "shares_prompts": row["shares_prompts"] and other["shares_prompts"],
    }


if __name__ == "__main__":
    main(sys.argv[1:])
