"""One run's state in the trainer: adapter, optimizer, RNG, loss scale, step count; saved and loaded.

Files under a checkpoint directory (safetensors and JSON only)::

    adapter/adapter_model.safetensors  adapter/adapter_config.json     loadable by PEFT and by engines
    optimizer.safetensors  optimizer.json  rng.safetensors  state.json
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from insitu.errors import Conflict, CorruptCheckpoint
from insitu.training.model.lora import Adapter, check_tensors
from insitu.training.model.loss_scale import LossScale
from insitu.training.model.residence import num_bytes
from insitu.types import LoraSettings

_FORMAT = 1
_MOMENTS = ("exp_avg", "exp_avg_sq")


class Learner:
    """One run's learning state. `step` counts the training steps taken, skipped ones included."""

    def __init__(self, run: str, adapter: Adapter) -> None:
        self.run = run
        self.adapter = adapter
        self.parameters = adapter.parameters()
        self.optimizer = torch.optim.AdamW(list(self.parameters.values()), weight_decay=0.0)
        self.step = 0
        self.loss_scale = LossScale()
        """Used in float16 only."""
        self._rng = _seeded_rng(adapter.settings.seed)

    @property
    def num_bytes(self) -> int:
        """The memory of its weights and their two moments, which the first update creates."""
        return num_bytes(self.parameters.values()) * (1 + len(_MOMENTS))

    @contextmanager
    def rng(self) -> Iterator[None]:
        """Use this run's random state inside the block and keep its result, so that runs stay independent."""
        with torch.random.fork_rng():
            _set_rng(self._rng)
            yield
            self._rng = _get_rng()

    def save(self, directory: Path, base_model: str) -> None:
        """Write every file; the caller makes them durable."""
        adapter_dir = directory / "adapter"
        adapter_dir.mkdir(parents=True, exist_ok=True)
        weights = {name: _plain(parameter) for name, parameter in self.parameters.items()}
        save_file(weights, adapter_dir / "adapter_model.safetensors", metadata={"format": "pt"})
        _write_json(adapter_dir / "adapter_config.json", self.adapter.config(base_model))
        moments, num_updates = self._optimizer_state()
        save_file(moments, directory / "optimizer.safetensors")
        _write_json(directory / "optimizer.json", {"algorithm": "adamw", "num_updates": num_updates})
        save_file(self._rng, directory / "rng.safetensors")
        state = {
            "format": _FORMAT,
            "run": self.run,
            "step": self.step,
            "lora": asdict(self.adapter.settings),
            "loss_scale": asdict(self.loss_scale),
        }
        _write_json(directory / "state.json", state)

    def load(self, directory: Path) -> None:
        """Restore exactly the saved learner; the error names a wrong or damaged file."""
        state = _read_state(directory)
        mine = {"run": self.run, "lora": asdict(self.adapter.settings)}
        if {"run": state["run"], "lora": asdict(LoraSettings(**state["lora"]))} != mine:
            raise Conflict(f"the checkpoint {directory} belongs to {state}, not to {mine}")
        load_adapter(self.adapter, directory)
        self._load_training(directory, state)
        self.step = int(state["step"])

    def start_from(self, directory: Path, *, whole: bool) -> None:
        """Start at step 0 with the adapter of another run's checkpoint, or of a directory that has only that.

        `whole`: take its optimizer, random state and loss scale too, so that the next step is the one that
        the other run would take.
        """
        load_adapter(self.adapter, directory)
        if whole:
            self._load_training(directory, _read_state(directory))

    def _load_training(self, directory: Path, state: Mapping[str, Any]) -> None:
        self._load_optimizer(directory)
        self._rng = _read_tensors(directory / "rng.safetensors")
        self.loss_scale = LossScale.read(state.get("loss_scale"))

    def _optimizer_state(self) -> tuple[dict[str, Tensor], int]:
        moments: dict[str, Tensor] = {}
        num_updates = 0
        for name, parameter in self.parameters.items():
            state: dict[str, Tensor] = self.optimizer.state.get(parameter, {})
            for moment in _MOMENTS:
                kept = state.get(moment)
                moments[f"{moment}.{name}"] = torch.zeros(parameter.shape) if kept is None else _plain(kept)
            num_updates = int(state["step"]) if state else 0
        return moments, num_updates

    def _load_optimizer(self, directory: Path) -> None:
        num_updates = int(_read_json(directory / "optimizer.json")["num_updates"])
        moments = _read_tensors(directory / "optimizer.safetensors")
        shapes = {f"{m}.{name}": p.shape for name, p in self.parameters.items() for m in _MOMENTS}
        check_tensors(moments, shapes, str(directory / "optimizer.safetensors"))
        self.optimizer.state.clear()
        if num_updates == 0:  # AdamW creates its own state at the first update
            return
        for name, parameter in self.parameters.items():
            restored = {m: moments[f"{m}.{name}"].to(parameter.device) for m in _MOMENTS}
            self.optimizer.state[parameter] = {"step": torch.tensor(float(num_updates)), **restored}


def adapter_settings(directory: Path) -> LoraSettings:
    """Return the settings of a checkpoint's adapter."""
    return LoraSettings(**_read_json(directory / "state.json")["lora"])


def load_adapter(adapter: Adapter, directory: Path) -> None:
    """Load an adapter's weights from a checkpoint."""
    path = directory / "adapter" / "adapter_model.safetensors"
    adapter.load(_read_tensors(path), str(path))


def _read_state(directory: Path) -> dict[str, Any]:
    state = _read_json(directory / "state.json")
    if state.get("format") != _FORMAT:
        raise CorruptCheckpoint(
            f"{directory / 'state.json'} has format {state.get('format')!r}; readable is {_FORMAT}",
            hint="resume with the version of insitu that wrote it",
        )
    return state


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _seeded_rng(seed: int) -> dict[str, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return _get_rng()


def _get_rng() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_rng(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CorruptCheckpoint(
            f"{path} cannot be read: {error}", hint="resume from an earlier checkpoint"
        ) from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CorruptCheckpoint(
            f"{path} cannot be read: {error}", hint="resume from an earlier checkpoint"
        ) from error
