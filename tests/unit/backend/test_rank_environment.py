"""The environment in which a rank loads torch."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="trainer ranks are Ray actors")


@pytest.mark.parametrize("devices", [None, "0"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_rank_on_a_gpu_grows_in_segments(
    device: str, devices: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one whose GPU Ray has chosen, which gets no devices from the supervisor."""
    from insitu.backend.fleet import trainer, trainer_rank

    seen: list[str] = []

    class StandinRank:
        def __init__(self, **_: object) -> None:
            seen.append(os.environ.get("PYTORCH_ALLOC_CONF", ""))

        def info(self) -> dict[str, object]:
            return {}

    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(trainer_rank, "TrainerRank", StandinRank)
    monkeypatch.setattr(trainer, "Node", lambda *_: SimpleNamespace(log=tmp_path / "log"))
    monkeypatch.setattr(trainer, "log_to", lambda _: None)
    arguments: Any = {"device": device, "master_address": "127.0.0.1", "four_bit": True}
    trainer._RankActor("", devices).load(arguments)
    assert ("expandable_segments:True" in seen[0]) is (device == "cuda")
