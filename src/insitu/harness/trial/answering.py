"""Answering: the model that answers a trial, at a gateway or at any server of the OpenAI protocol."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from insitu.errors import InsituError, InvalidRequest, Unavailable
from insitu.gateway_client import GatewayClient
from insitu.harness.assembly import outside_binding
from insitu.harness.gateway_check import explained, served_models
from insitu.harness.interfaces.trained_model import TrainedModel, serve_command
from insitu.wire.transport import SOON
from insitu.workflow.binding import LLMBinding


@dataclass(frozen=True, slots=True)
class Answering:
    """The model that is called, its address, and the gateway that records its calls."""

    binding: LLMBinding
    address: str
    gateway: GatewayClient | None = None
    """None: the server is not a gateway, so tokens and calls of a rollout are not known."""
    run: str | None = None
    """The run whose newest step answers; None: the base model."""


@asynccontextmanager
async def answering(binding: LLMBinding, model: TrainedModel) -> AsyncGenerator[Answering]:
    """Find out who answers at the address of the trained model.

    On a gateway it is the run, or the base model if the run is not registered yet.
    """
    async with GatewayClient(binding.gateway_urls, binding.api_key, retry=SOON) as gateway:
        if not await _is_gateway(gateway, binding, model):
            yield _outside(binding, model)
            return
        served = await served_models(gateway, binding, model)
        if model.name in served:
            yield Answering(binding, binding.gateway_url, gateway, model.name)
        elif model.base_model in served:
            base = replace(binding, model=model.base_model)
            yield Answering(base, binding.gateway_url, gateway)
        else:
            raise InvalidRequest(
                f"the gateway at {binding.gateway_url} serves neither the run {model.name!r} nor "
                f"{model.base_model!r}; it serves {', '.join(served) or 'nothing'}",
                hint="name a served model in the configuration, or serve this one: "
                f"{serve_command(model.base_model)}",
            )


async def _is_gateway(gateway: GatewayClient, binding: LLMBinding, model: TrainedModel) -> bool:
    try:
        await gateway.health()
    except InsituError as error:
        better = await explained(error, binding, model)
        if better is not error or isinstance(error, Unavailable):
            raise better from error
        return False  # it answers, but not as a gateway does
    return True


def _outside(binding: LLMBinding, model: TrainedModel) -> Answering:
    """Call the server at the entry's own address, by the entry's own model."""
    names = sorted(binding.trained)
    url = next((url for name in names if (url := binding.llms[name].base_url)), f"{binding.gateway_url}/v1")
    outside = outside_binding(binding, url, model.base_model, binding.api_key or "none")
    # Without a gateway, else calls would name their rollout in the path.
    return Answering(replace(outside, gateway_url="", further_gateways=()), url)
