"""The gateway's first answer: the models that it serves, or the setting that is wrong."""

from __future__ import annotations

from insitu.client import InsituClient
from insitu.errors import Forbidden, InsituError, InvalidRequest, Unauthorized, Unavailable, Untrusted
from insitu.gateway_client import GatewayClient
from insitu.harness.interfaces.settings import GATEWAY_PORT
from insitu.harness.interfaces.trained_model import TrainedModel, serve_command
from insitu.system.keys import DEFAULT_KEY
from insitu.wire.transport import BROKEN, ONCE, text_of
from insitu.workflow.binding import LLMBinding


async def served_models(gateway: GatewayClient, binding: LLMBinding, model: TrainedModel) -> list[str]:
    """Return the names that the gateway serves; an error names the setting that is wrong."""
    try:
        return await gateway.models()
    except InsituError as error:
        raise await explained(error, binding, model) from error


async def explained(error: InsituError, binding: LLMBinding, model: TrainedModel) -> InsituError:
    """Return an error that says which setting to change; the same one if no setting is known to be wrong."""
    if isinstance(error, Untrusted):
        return error
    if isinstance(error, Unauthorized | Forbidden):
        return type(error)(
            f"the gateway at {binding.gateway_url} rejects the key of {binding.key_setting}: {error.message}",
            hint=f"set it to the key that `insitu serve` was started with (INSITU_API_KEY there, else "
            f"`{DEFAULT_KEY}`), or to one from `insitu keys create`",
        )
    if isinstance(error, Unavailable):
        cause = error.__cause__
        return _unreachable(cause, binding, model) if isinstance(cause, BROKEN) else error
    return await _api(binding) or error


def _unreachable(cause: Exception, binding: LLMBinding, model: TrainedModel) -> Unavailable:
    setting, given = binding.address_setting, binding.address_given
    said = f"no gateway answers at {binding.gateway_url}, "
    if given:
        said += f"the address in {setting}"
    elif model.gateway_known:
        said += "the address that the backend names"
    else:
        said += f"the backend's host with the default port {GATEWAY_PORT}"
    if given and model.gateway_known and model.gateway_url != binding.gateway_url:
        hint = f"the backend's gateway is at {model.gateway_url}: remove {setting}, or set it to "
        hint += f"{model.gateway_url}/v1"
    elif model.gateway_known:
        hint = f"look at gateway.log in the backend's state directory; behind a proxy or tunnel set {setting}"
    else:
        hint = f"start it: {serve_command(model.base_model)}; or set {setting} to the address of the "
        hint += "gateway, which `insitu serve` prints"
    return Unavailable(f"{said}: {text_of(cause)}", hint=hint)


async def _api(binding: LLMBinding) -> InvalidRequest | None:
    """Return the error if the API of a backend answers where the gateway should."""
    async with InsituClient(binding.gateway_url, binding.api_key, retry=ONCE) as client:
        try:
            health = await client.health()
        except InsituError:
            return None  # some other server: its own answer is the error
    default = f"the gateway's address, by default port {GATEWAY_PORT}"
    right = f"{health.gateway_url}/v1" if health.gateway_url else default
    return InvalidRequest(
        f"{binding.gateway_url} is the API of a backend, not its gateway, which answers model calls",
        hint=f"set {binding.address_setting} to {right}",
    )
