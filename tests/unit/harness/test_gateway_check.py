"""A gateway that cannot be used: the error names the address, the setting and the next command.

One backend serves all of it: starting one costs more than the questions.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from insitu.config.load import load_config
from insitu.errors import InsituError, InvalidRequest, Unauthorized, Unavailable
from insitu.gateway_client import GatewayClient
from insitu.harness.assembly import Assembly
from insitu.harness.finetune import build_components
from insitu.harness.gateway_check import served_models
from insitu.harness.trial.answering import answering
from insitu.testing.standin_gateway import StandinGateway
from insitu.wire.transport import ONCE
from tests.support.finetune_bench import FinetuneBench, open_bench

ADDRESS, KEY, PORT = "llms.policy.base_url", "llms.policy.api_key", "trainer_adapters.backend.backend.port"


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FinetuneBench]:
    monkeypatch.setattr("insitu.wire.transport.RetryPolicy.pause", lambda *_: 0.0)
    async with open_bench(tmp_path, monkeypatch) as bench:
        yield bench


async def ask(*overrides: tuple[str, str], trial: bool = False) -> Any:
    """The first question to the gateway, with these settings."""
    async with Assembly(load_config("config.yml", overrides)) as parts:
        made = await build_components(parts)
        model = made.adapter.trained_model
        binding = (await made.training_task(parts)).agent.binding
        if trial:
            async with answering(binding, model) as who:
                return who
        async with GatewayClient(binding.gateway_url, binding.api_key, retry=ONCE) as gateway:
            return binding, await served_models(gateway, binding, model)


async def failure(
    kind: type[InsituError], *overrides: tuple[str, str], trial: bool = False
) -> tuple[str, str]:
    with pytest.raises(kind) as caught:
        await ask(*overrides, trial=trial)
    return caught.value.message, caught.value.hint


async def test_every_error_names_the_setting(bench: FinetuneBench) -> None:
    backend, nowhere = bench.backend, (ADDRESS, "http://127.0.0.1:9/v1")
    for trial in (False, True):
        message, hint = await failure(Unavailable, nowhere, trial=trial)
        assert (
            f"no gateway answers at http://127.0.0.1:9, the address in {ADDRESS}: cannot connect" in message
        )
        assert "ssl:default" not in message
        assert f"remove {ADDRESS}, or set it to {backend.gateway_url}/v1" in hint

        message, hint = await failure(InvalidRequest, (ADDRESS, f"{backend.api_url}/v1"), trial=trial)
        assert f"{backend.api_url} is the API of a backend, not its gateway" in message
        assert hint == f"set {ADDRESS} to {backend.gateway_url}/v1"

        message, hint = await failure(Unauthorized, (KEY, "wrong"), trial=trial)
        assert f"rejects the key of {KEY}" in message
        assert "INSITU_API_KEY" in hint

    _, hint = await failure(Unavailable, nowhere, (PORT, "9"))
    assert f"insitu serve --model DIRECTORY_OR_HUB_ID --model-name tiny; or set {ADDRESS}" in hint

    async with Assembly(load_config("config.yml", [(PORT, str(backend.gateway_port))])) as parts:
        made = await build_components(parts)
        with pytest.raises(InvalidRequest, match="is the gateway of a backend, not its API") as caught:
            await made.adapter.check()
    assert "backend.port" in caught.value.hint
    assert "7623" in caught.value.hint


async def test_the_address_comes_from_the_backend_if_the_configuration_has_none(
    bench: FinetuneBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, file = bench.backend, Path("config.yml")
    file.write_text(
        "model: {model_name: tiny}\nagent: small_agent:answer\ndata: train.json\n"
        f"reward: small_agent:reward\nbackend: {backend.api_url}\n"
    )
    binding, served = await ask()
    assert (binding.gateway_url, served) == (backend.gateway_url, ["tiny"])
    message, _ = await failure(Unauthorized, ("model.api_key", "wrong"))
    assert "rejects the key of model.api_key" in message  # as the short form writes it
    async with StandinGateway(lambda *_: "0") as server:
        who = await ask(("model.base_url", f"{server.url}/v1"), trial=True)
    assert (who.gateway, who.address) == (None, f"{server.url}/v1")  # a setting wins

    # As if the API were on another host, and the gateway that it names on that host's loopback.
    monkeypatch.setattr("insitu.harness.backend_adapter._is_local", lambda url: url == backend.gateway_url)
    monkeypatch.setattr("insitu.harness.backend_adapter.GATEWAY_PORT", 9)
    message, hint = await failure(Unavailable)
    assert "http://127.0.0.1:9, the backend's host with the default port" in message
    assert "set model.base_url" in hint
