"""Programs written for ART 0.5.17 and, with `InsituBackend`, 0.5.18: the same session, step for step."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from insitu.system.processes import free_port
from insitu.testing.models import tiny
from tests.compat.conftest import KEY, StandinProcess
from tests.compat.environment import ART, HERE, NAT, ROOT, Environment
from tests.support.backend import Backend, running_backend

CLIENTS = [
    pytest.param("remote", NAT, id="0.5.17", marks=pytest.mark.skipif(not NAT.ready, reason=NAT.why_not)),
    pytest.param("insitu", ART, id="0.5.18", marks=pytest.mark.skipif(not ART.ready, reason=ART.why_not)),
]
VERSIONS = {"remote": "0.5.17", "insitu": "0.5.18"}
NUM_STEPS = 3
DOCS = ROOT / "docs" / "coming-from-art.md"


async def run(*command: str, cwd: Path, env: dict[str, str]) -> tuple[int | None, str, str]:
    """A program to its end: exit code, output, errors."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, cwd=cwd, env=env, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(200):
            out, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, out.decode(), errors.decode()


async def session(
    environment: Environment, kind: str, url: str, directory: Path, *options: str, key: str = KEY
) -> tuple[dict[str, Any] | None, str]:
    """What the program saw, or None and what it said when it failed."""
    program = (environment.program(), str(HERE / "art_session.py"))
    command = (*program, kind, url, key, "--name", f"art-{kind}", *options)
    ended, out, errors = await run(*command, cwd=directory, env=environment.variables(directory))
    return (json.loads(out.splitlines()[-1]) if ended == 0 else None), errors


async def check(backend: StandinProcess | Backend, kind: str, seen: dict[str, Any] | None, said: str) -> None:
    """The session went through, and the backend saw the same."""
    assert seen is not None, said
    assert seen["art"] == VERSIONS[kind]
    assert seen["steps"] == list(range(NUM_STEPS + 1))
    async with backend.client() as client:
        steps = await client.steps(f"art-{kind}")
        kept = await client.checkpoints(f"art-{kind}")
    assert [step.step for step in steps] == [1, 2, 3]
    assert [step.metrics["reward/mean"] for step in steps] == pytest.approx(seen["rewards"])
    for step in steps:
        assert step.metrics["account/trajectories"] == 8
        assert step.metrics["account/calls"] == 24, "two turns and an aside of each rollout"
    assert [checkpoint.step for checkpoint in kept] == [2, 3]
    if kind == "insitu":
        assert seen["names"] == [f"art-insitu@{step}" for step in range(NUM_STEPS + 1)]
        assert [metrics["account/refused"] for metrics in seen["metrics"]] == [0.0] * NUM_STEPS
        assert [m["reward/mean"] for m in seen["metrics"]] == pytest.approx(seen["rewards"])


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[StandinProcess]:
    """A stand-in on any port, slow enough to lose its answers."""
    arguments = ("--text", "4", "--text", "7", "--text", "13", "--train-seconds", "1.5")
    standin = StandinProcess(tmp_path / "state", arguments, gateway_port=free_port())
    try:
        standin.start()
        yield standin
    finally:
        standin.kill()


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("kind", "environment"), CLIENTS)
async def test_a_request_whose_answer_is_lost_makes_no_step_twice(
    backend: StandinProcess, tmp_path: Path, kind: str, environment: Environment
):
    seen, said = await session(environment, kind, backend.api_url, tmp_path, "--lose-answer")
    await check(backend, kind, seen, said)
    assert seen is not None
    assert seen["lost"] == NUM_STEPS, "each step was asked for twice"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("kind", "environment"), CLIENTS)
async def test_a_wrong_key_is_said(
    backend: StandinProcess, tmp_path: Path, kind: str, environment: Environment
):
    seen, said = await session(environment, kind, backend.api_url, tmp_path, key="wrong")
    assert seen is None
    assert "401" in said or "the key is missing or wrong" in said


@pytest.mark.timeout(200)
@pytest.mark.skipif(not ART.ready, reason=ART.why_not)
async def test_the_example_of_the_docs_runs(backend: StandinProcess, tmp_path: Path):
    """As it stands, with only the address and the model's name changed."""
    (program,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    own = program.replace("http://127.0.0.1:7623", backend.api_url).replace('"my-model"', '"tiny"')
    (tmp_path / "example.py").write_text(own)
    variables = ART.variables(tmp_path) | {"INSITU_API_KEY": KEY}
    ended, said, errors = await run(ART.program(), "example.py", cwd=tmp_path, env=variables)
    assert ended == 0, errors
    assert re.findall(r"^step (\d): reward [\d.]+$", said, re.MULTILINE) == ["1", "2", "3"]


@pytest.mark.timeout(600)
@pytest.mark.skipif(not (NAT.ready and ART.ready), reason=f"{NAT.why_not}; {ART.why_not}")
async def test_both_train_a_real_model(tmp_path: Path):
    arguments = (
        "--model",
        str(tiny()),
        "--model-name",
        "tiny",
        "--max-seq-length",
        "512",
        "--dtype",
        "float32",
    )
    async with running_backend(tmp_path / "state", *arguments) as backend:
        for kind, environment in (("remote", NAT), ("insitu", ART)):
            seen, said = await session(environment, kind, backend.api_url, tmp_path)
            await check(backend, kind, seen, said)
            async with backend.client() as client:
                for step in await client.steps(f"art-{kind}"):
                    assert step.metrics["mismatch/mean_abs"] < 1e-4, "the tokens trained are those sampled"
                await client.close_run(f"art-{kind}")
        stranger = ("--name", "stranger", "--base-model", "nobody/knows")
        seen, said = await session(ART, "insitu", backend.api_url, tmp_path, *stranger)
        assert seen is None
        assert "run 'stranger' is failed" in said, said
        assert "nobody/knows" in said
