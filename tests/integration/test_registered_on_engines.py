"""Which runs a backend takes: the first loads a model; arguments are applied, or refused with the reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import aiohttp
import pytest

from insitu.access import engine_door
from insitu.client import InsituClient
from insitu.errors import ChildFailed
from insitu.testing.models import tiny
from insitu.types import LoraSettings
from tests.support.backend import Backend

HUB_ID = "insitu-tests/tiny"


@pytest.mark.timeout(600)
async def test_first_registration_loads_a_model_from_the_hub_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_cache_with(tiny(), tmp_path / "hf")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    backend = Backend(tmp_path / "state", ["--dtype", "float32"])
    backend.start()
    try:
        await backend.ready()
        async with backend.client() as client:
            await refused(client, "outside", "/etc", {}, {}, "is not a model name")
            await refused(client, "gpu", HUB_ID, {"gpu_memory_utilization": 0.9}, {}, "runs on a CPU")
            await refused(client, "absent", "insitu-tests/absent", {}, {}, "insitu-tests/absent")
            await client.register_run("first", HUB_ID, init_args={"max_seq_length": 128})
            await client.wait_run_ready("first", 400)
            assert backend.engine_argument("--max-model-len") == "128"
            await closed_to_others(backend)
            await refused(client, "second", HUB_ID, {}, {}, "one run at a time, now first")
            # Alone on the engine, a run may change it.
            await client.close_run("first")
            await client.register_run("head", HUB_ID, lora=LoraSettings(target_modules=["lm_head"]))
            with pytest.raises(ChildFailed, match="lm_head cannot be adapted in this model"):
                await client.wait_run_ready("head", 400)
            await client.register_run("third", HUB_ID, init_args={"max_seq_length": 192})
            run = await client.wait_run_ready("third", 400)
            assert run.init_args == {"max_seq_length": 192}
            assert backend.engine_argument("--max-model-len") == "192"
    finally:
        backend.end()


async def closed_to_others(backend: Backend) -> None:
    """The engine on loopback answers nobody without its key, whatever the route."""
    url = f"http://127.0.0.1:{backend.engine_argument('--port')}"
    async with aiohttp.ClientSession() as http:
        for sent in ({}, engine_door.headers("0" * 64)):
            for path in ("/health", "/metrics", "/v1/models", "/is_sleeping", "/nowhere"):
                async with http.get(url + path, headers=sent) as answer:
                    assert answer.status == 401
            for path in ("/collective_rpc", "/sleep", "/v1/completions", "/v1/load_lora_adapter"):
                async with http.post(url + path, headers=sent, json={}) as answer:
                    assert answer.status == 401
        assert await backend.engine_client(http).healthy()


async def refused(
    client: InsituClient, name: str, base_model: str, engine_args: dict, init_args: dict, why: str
) -> None:
    await client.register_run(name, base_model, engine_args=engine_args, init_args=init_args)
    with pytest.raises(ChildFailed, match=why):
        await client.wait_run_ready(name, 400)


def hub_cache_with(model: Path, home: Path) -> None:
    """The tiny model as the hub's client would have stored it."""
    folder = home / "hub" / f"models--{HUB_ID.replace('/', '--')}"
    revision = "0" * 40
    shutil.copytree(model, folder / "snapshots" / revision)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(revision)
    assert json.loads((folder / "snapshots" / revision / "config.json").read_text())
