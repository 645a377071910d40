"""`insitu doctor --device`: the trainer's side, then an engine, one after the other on the device."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from insitu.backend.plan.compute import Asked, choose
from insitu.backend.plan.cpu import read_cpu
from insitu.backend.plan.models.files import read_kind
from insitu.doctor.engine_side import ADAPTER, NOISE, SLEEP, START, EngineChecks, check_engine
from insitu.doctor.finding import Finding, failed, skipped
from insitu.doctor.trainer_report import TrainerReport
from insitu.errors import ChildFailed, DeadlineExceeded, InsituError, InvalidRequest, describe, foreign_code
from insitu.system.paths import cache_dir
from insitu.system.processes import MARK, end_child, end_marked, remove_tree, spawn, start_janitor, tail
from insitu.training.model.families import families
from insitu.wire.message import Malformed, read

Say = Callable[[Finding], None]

_TRAINER_SECONDS = 1200.0
"""Loading a model, compiling flex attention and one step."""
_GRACE_SECONDS = 3.0
_ENGINE_CHECKS = (START, NOISE, SLEEP, ADAPTER)


def check_device(model: str | None, say: Say) -> list[Finding]:
    """Run all checks, handing each finding to `say`; leave no process or temporary directory behind."""
    findings: list[Finding] = []

    def report(found: list[Finding]) -> None:
        findings.extend(found)
        for finding in found:
            say(finding)

    logs = cache_dir() / "doctor"
    name = model or _default_model()
    with _scratch() as scratch:
        environment = _environment(scratch)
        try:
            trainer = _trainer_side(name, scratch, environment, _fresh(logs / "trainer.log"))
        except InsituError as error:
            report([failed("trainer", error, hint=f"see {logs / 'trainer.log'}")])
            report([skipped(check, "the trainer's checks did not finish") for check in _ENGINE_CHECKS])
            return findings
        report(trainer.findings)
        if trainer.lesson is None:
            report([skipped(check, "the training step failed") for check in _ENGINE_CHECKS])
            return findings
        compute = choose(read_cpu(), trainer.device, Asked(dtype=trainer.dtype))
        family = families().get(read_kind(name).model_type or "")
        checks = EngineChecks(name, trainer.device, compute, trainer.lesson, family)
        report(asyncio.run(check_engine(checks, environment, _fresh(logs / "engine.log"))))
    return findings


def _default_model() -> str:
    """Return the tiny model; it is built when missing."""
    from insitu.testing.models import tiny

    def explain(error: BaseException) -> InsituError:
        return InvalidRequest(
            f"the tiny model for the checks could not be built: {describe(error)}",
            hint="name a model: insitu doctor --device --model DIRECTORY_OR_HUB_ID",
        )

    with foreign_code(explain):
        return str(tiny())


def _trainer_side(model: str, scratch: Path, environment: dict[str, str], log: Path) -> TrainerReport:
    """Run the trainer's checks in a process of their own and read its report."""
    command = [sys.executable, "-m", "insitu.doctor.trainer_side", model, str(scratch)]
    child = spawn(command, log, environment)
    try:
        code = child.wait(_TRAINER_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise DeadlineExceeded(f"the trainer's checks took over {_TRAINER_SECONDS:.0f} s") from error
    finally:
        end_child(child, _GRACE_SECONDS)
    if code != 0:
        raise ChildFailed(f"the trainer's checks ended with exit code {code}: {tail(log, 3)}")
    try:
        return read(TrainerReport, (scratch / "report.json").read_bytes())
    except (OSError, Malformed) as error:
        raise ChildFailed(f"the trainer's checks left no report that can be read: {error}") from error


@contextmanager
def _scratch() -> Generator[Path]:
    """Yield a temporary directory. When the block or this process ends, so does every process it started."""
    own_id = uuid.uuid4().hex
    scratch = Path(tempfile.mkdtemp(prefix="insitu-"))
    os.environ[MARK] = own_id
    janitor = start_janitor(own_id, scratch)
    try:
        yield scratch
    finally:
        end_marked(own_id, 5.0, keep=frozenset({janitor.pid}))
        remove_tree(scratch)
        assert janitor.stdin is not None
        janitor.stdin.write(b"done\n")
        janitor.stdin.close()
        janitor.wait(15)
        del os.environ[MARK]


def _environment(scratch: Path) -> dict[str, str]:
    """Keep temporary files in the scratch directory and compiled kernels across runs."""
    return {
        "TMPDIR": str(scratch),
        "VLLM_RPC_BASE_PATH": str(scratch),
        "TORCHINDUCTOR_CACHE_DIR": str(cache_dir() / "torchinductor"),
    }


def _fresh(log: Path) -> Path:
    """Remove the log of an earlier run."""
    log.unlink(missing_ok=True)
    return log
