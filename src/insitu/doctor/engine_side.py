"""The checks of the engine's side: a real vLLM server takes a trained adapter as a publication does.

    start ─► score, again and again (noise) ─► sleep ─► weights ─► adapter ─► KV cache ─► score both

Without CUDA the engine cannot sleep; everything else runs.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise, starmap
from pathlib import Path

import aiohttp

from insitu.access import engine_door
from insitu.backend.fleet.replica import EngineClient, ReplicaActor, wait_healthy
from insitu.backend.plan.compute import Compute
from insitu.backend.plan.engine import Device, Dtype, EngineSettings
from insitu.backend.plan.settings import PROBE_THRESHOLDS
from insitu.backend.serving.probe import Noise, compare, judge, noise_of
from insitu.doctor.finding import NO_CUDA, Figure, Finding, failed, measured, skipped
from insitu.doctor.trainer_report import Lesson, Scores
from insitu.errors import InsituError
from insitu.training.model.families import Family

SERVED_NAME = "doctor"
ADAPTER_NAME = "doctor@1"

START, NOISE, SLEEP, ADAPTER = "engine start", "probe noise", "sleep and wake", "adapter"

_START_SECONDS = 600.0
_NUM_SCORINGS = 3
_SAME: dict[Dtype, float] = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 3e-2}
"""Mean |Δlogprob| of the same weights before and after; three times the measured noise if that is more."""


@dataclass(frozen=True, slots=True)
class EngineChecks:
    """The needs of the engine's checks: the model, how to run it, and the trainer's lesson."""

    model: str
    device: Device
    compute: Compute
    lesson: Lesson
    family: Family | None = None
    """The model's, if it is known."""

    def settings(self) -> EngineSettings:
        """Return the settings that `insitu serve` would choose, for a few short sequences."""
        return EngineSettings(
            model=self.model,
            served_name=SERVED_NAME,
            device=self.device,
            dtype=self.compute.dtype,
            publication="adapter",
            sleep=self.device == "cuda",
            max_model_len=256,
            max_num_seqs=8,
            enforce_eager=self.device == "cpu",
            kv_cache_gib=1,
            block_size=self.compute.block_size,
            lora_modules=None if self.family is None else self.family.adapts,
            hybrid=self.family is not None and self.family.hybrid,
        )


async def check_engine(checks: EngineChecks, environment: dict[str, str], log: Path) -> list[Finding]:
    """Start an engine, run every check on it and end it."""
    began = time.monotonic()
    hint = f"see {log}"
    findings: list[Finding] = []
    try:
        async with _engine(checks, environment, log) as engine:
            seconds = time.monotonic() - began
            findings.append(measured(START, [Figure("ready after", seconds, _START_SECONDS, "s")], hint=hint))
            await cycle(checks, engine, findings, hint)
    except InsituError as error:
        left = [name for name in (START, NOISE, SLEEP, ADAPTER) if name not in {f.name for f in findings}]
        findings.append(failed(left[0], error, hint=hint))
        findings += [skipped(name, f"{left[0]} failed") for name in left[1:]]
    return findings


@asynccontextmanager
async def _engine(
    checks: EngineChecks, environment: dict[str, str], log: Path
) -> AsyncGenerator[EngineClient]:
    """Run a server without Ray; it ends with this block."""
    settings = checks.settings()
    threads = next(iter(checks.compute.engine_threads), None)
    key = engine_door.new_key()
    replica = ReplicaActor(settings, str(log), environment, key, threads)
    try:
        async with aiohttp.ClientSession() as http:
            engine = EngineClient(http, replica.describe().url, key=key)

            async def exit_report() -> str | None:
                return replica.exit_report()

            await wait_healthy(engine, exit_report, _START_SECONDS)
            await engine.warm_up(settings, _START_SECONDS)
            yield engine
    finally:
        replica.stop()


async def cycle(checks: EngineChecks, engine: EngineClient, findings: list[Finding], hint: str) -> None:
    """Score, sleep, wake, load the adapter and score again; append each finding as it is made."""
    lesson, dtype = checks.lesson, checks.compute.dtype
    threshold, adapter = PROBE_THRESHOLDS[dtype], Path(lesson.adapter)
    scorings = [await engine.score(SERVED_NAME, lesson.fixed) for _ in range(_NUM_SCORINGS)]
    noise = largest_noise(scorings)
    findings.append(noise_finding(noise, threshold))
    if checks.device == "cuda":
        began = time.monotonic()
        await engine.sleep()
        await engine.wake_up("weights")
        await engine.load_adapter(ADAPTER_NAME, adapter)
        await engine.wake_up("kv_cache")
        seconds = time.monotonic() - began
        base = await engine.score(SERVED_NAME, lesson.fixed)
        same = _moved_by(scorings[-1], base, noise, dtype)
        findings.append(measured(SLEEP, [same], hint=hint, detail=f"{seconds:.1f} s with the adapter"))
    else:
        findings.append(skipped(SLEEP, NO_CUDA))
        await engine.load_adapter(ADAPTER_NAME, adapter)
        base = await engine.score(SERVED_NAME, lesson.fixed)
        same = _moved_by(scorings[-1], base, noise, dtype)
    adapted = await engine.score(ADAPTER_NAME, lesson.fixed)
    findings.append(adapter_finding(lesson, base, adapted, noise, threshold, same, hint))


def largest_noise(scorings: list[Scores]) -> Noise:
    """Return the largest noise between one scoring and the next."""
    return max(starmap(noise_of, pairwise(scorings)), key=lambda noise: noise.rms)


def noise_finding(noise: Noise, threshold: float) -> Finding:
    """Judge the noise: beyond the probe's threshold it would hide wrong weights."""
    figures = [Figure("mean |Δlogprob|", noise.mean_abs, threshold), Figure("max", noise.max_abs)]
    return measured(NOISE, figures, hint="serve with --dtype float32, or --probe-threshold")


def adapter_finding(
    lesson: Lesson, base: Scores, adapted: Scores, noise: Noise, threshold: float, same: Figure, hint: str
) -> Finding:
    """Judge the adapter as the probe judges a publication; the base model must not have moved."""
    result = compare(lesson.before, lesson.after, base, adapted, noise)
    try:
        judge(result, threshold, "the engine", "the adapter")
    except InsituError as error:
        return failed(ADAPTER, error, hint=hint)
    agreement = Figure("engine − trainer", result.mean_abs, threshold + min(noise.mean_abs, threshold))
    share = [] if result.applied is None else [Figure("share of the change", result.applied)]
    return measured(ADAPTER, [agreement, same, *share], hint=hint)


def _moved_by(before: Scores, after: Scores, noise: Noise, dtype: Dtype) -> Figure:
    """Measure how far the base model's scores moved; they may move by its noise only."""
    bound = max(_SAME[dtype], 3 * noise.mean_abs)
    return Figure("base moved by", noise_of(before, after).mean_abs, bound)
