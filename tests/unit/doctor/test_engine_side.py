"""The engine's checks on a stand-in client: the order of a cycle on CUDA, and every verdict."""

from __future__ import annotations

import random
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from insitu.backend.plan.compute import Compute
from insitu.backend.plan.engine import Device, EngineSettings
from insitu.doctor import engine_side
from insitu.doctor.engine_side import ADAPTER, NOISE, SLEEP, START, EngineChecks, check_engine
from insitu.doctor.finding import Finding
from insitu.doctor.trainer_report import Lesson, Scores
from insitu.errors import UpstreamError
from insitu.training.model.families import families

RNG = random.Random(0)
BEFORE = [[-RNG.random() * 5 for _ in range(200)]]
AFTER = [[x + RNG.gauss(0, 0.3) for x in BEFORE[0]]]
LESSON = Lesson("/somewhere/adapter", [[1] * 201], BEFORE, AFTER)


class StandinEngineClient:
    """Scores from a table, and a diary of what was asked."""

    url = "http://127.0.0.1:1"

    def __init__(self, adapted: Scores = AFTER, noise: float = 0.0, after_waking: float = 0.0) -> None:
        self.diary: list[str] = []
        self._adapted = adapted
        self._noise = noise
        self._after_waking = after_waking
        self._rng = random.Random(1)

    async def score(self, model: str, sequences: list[list[int]]) -> Scores:
        self.diary.append(f"score {model}")
        rows = self._adapted if model == "doctor@1" else BEFORE
        shift = self._after_waking if "load" in self.diary else 0.0
        return [[x + shift + self._rng.gauss(0, self._noise) for x in row] for row in rows]

    async def sleep(self) -> None:
        self.diary.append("sleep")

    async def wake_up(self, part: str | None = None) -> None:
        self.diary.append(f"wake {part}")

    async def load_adapter(self, name: str, path: Path) -> None:
        assert (name, str(path)) == ("doctor@1", LESSON.adapter)
        self.diary.append("load")


def checks(device: Device) -> EngineChecks:
    return EngineChecks("model", device, Compute("bfloat16", (), 1, None, ""), LESSON)


async def cycle(engine: StandinEngineClient, device: Device = "cuda") -> dict[str, Finding]:
    findings: list[Finding] = []
    await engine_side.cycle(checks(device), engine, findings, "see the log")  # type: ignore[arg-type]
    return {finding.name: finding for finding in findings}


async def test_on_cuda_the_adapter_arrives_between_weights_and_kv_cache() -> None:
    engine = StandinEngineClient()
    found = await cycle(engine)
    assert {finding.state for finding in found.values()} == {"ok"}
    assert engine.diary == [
        *["score doctor"] * 3,
        *("sleep", "wake weights", "load", "wake kv_cache"),
        *("score doctor", "score doctor@1"),
    ]


async def test_without_cuda_nothing_sleeps() -> None:
    engine = StandinEngineClient()
    found = await cycle(engine, "cpu")
    assert found[SLEEP].state == "skipped"
    assert found[ADAPTER].state == "ok"
    assert not {"sleep", "wake weights", "wake kv_cache"} & set(engine.diary)


async def test_an_engine_that_wakes_with_other_weights_fails() -> None:
    found = await cycle(StandinEngineClient(after_waking=0.2))
    assert found[NOISE].state == "ok"
    assert found[SLEEP].state == "failed"


async def test_an_adapter_without_effect_fails() -> None:
    found = await cycle(StandinEngineClient(adapted=BEFORE))
    assert found[ADAPTER].state == "failed"
    assert "still answers with the old weights" in found[ADAPTER].detail


async def test_an_engine_that_disagrees_with_the_trainer_fails() -> None:
    found = await cycle(StandinEngineClient(adapted=[[x - 1.0 for x in AFTER[0]]]))
    assert found[ADAPTER].state == "failed"
    assert "disagree" in found[ADAPTER].detail


async def test_small_noise_passes_and_is_shown() -> None:
    found = await cycle(StandinEngineClient(noise=0.02))
    assert {finding.state for finding in found.values()} == {"ok"}
    mean, largest = found[NOISE].figures
    assert mean.measured == pytest.approx(0.0226, rel=0.2)  # 2·0.02/√π
    assert (largest.measured or 0) > (mean.measured or 0)


async def test_noise_beyond_the_threshold_fails() -> None:
    assert (await cycle(StandinEngineClient(noise=0.5)))[NOISE].state == "failed"


def test_the_engine_sleeps_on_cuda_only() -> None:
    assert "--enable-sleep-mode" in checks("cuda").settings().command(1)
    assert "--enforce-eager" not in checks("cuda").settings().command(1)
    assert "--enable-sleep-mode" not in checks("cpu").settings().command(1)


def test_the_engine_wraps_the_layers_of_the_models_family() -> None:
    settings = replace(checks("cpu"), family=families()["lfm2"]).settings()
    assert {"w1", "w2", "w3", "in_proj"} <= {*settings.wrapped_modules}
    assert settings.hybrid


async def test_an_engine_that_ends_at_once_is_reported_and_the_rest_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real process that ends as a server without a device does."""
    command = [sys.executable, "-c", "raise SystemExit('no kernel image for this device')"]
    monkeypatch.setattr(EngineSettings, "command", lambda settings, port, address: command)
    found = await check_engine(checks("cpu"), {}, tmp_path / "engine.log")
    assert [(finding.name, finding.state) for finding in found] == [
        (START, "failed"),
        *((name, "skipped") for name in (NOISE, SLEEP, ADAPTER)),
    ]
    assert "no kernel image for this device" in found[0].detail
    assert found[0].hint == f"see {tmp_path / 'engine.log'}"


async def test_an_error_in_the_middle_fails_the_check_that_it_broke(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Sleepless(StandinEngineClient):
        async def wake_up(self, part: str | None = None) -> None:
            raise UpstreamError(f"the engine answered 500 to /wake_up?tags={part}")

    @asynccontextmanager
    async def engine(*_: object) -> AsyncGenerator[StandinEngineClient]:
        yield Sleepless()

    monkeypatch.setattr(engine_side, "_engine", engine)
    found = await check_engine(checks("cuda"), {}, tmp_path / "engine.log")
    assert [finding.state for finding in found] == ["ok", "ok", "failed", "skipped"]
    assert found[2].name == SLEEP
    assert "tags=weights" in found[2].detail
    assert found[3].detail == "sleep and wake failed"
