"""A gateway without a supervisor: the table holds the models that the engines themselves list."""

from __future__ import annotations

from insitu.errors import InsituError, UpstreamError
from insitu.gateway.engines.routes import Table, Target
from insitu.gateway.engines.upstream import Engine, ServedModel
from insitu.gateway.shared.faults import Fault
from insitu.gateway.shared.settings import Limits


async def table_of_upstreams(urls: tuple[str, ...], limits: Limits) -> Table:
    """Build a fixed table of the models that every upstream serves."""
    served: list[dict[str, Target]] = [await _models_of(url, limits) for url in urls]
    common = {name: target for name, target in served[0].items() if all(name in other for other in served)}
    if not common:
        raise UpstreamError(f"The upstreams {', '.join(urls)} have no model in common.")
    return Table(
        revision=1,
        hold=None,
        replicas={f"replica-{i}": url.rstrip("/") for i, url in enumerate(urls)},
        base=None,
        base_refusal=None,
        runs={},
        latest={},
        extra=common,
    )


async def _models_of(url: str, limits: Limits) -> dict[str, Target]:
    engine = Engine(url.rstrip("/"), limits)
    try:
        models = await engine.models()
    except (Fault, InsituError) as error:
        raise UpstreamError(
            f"The upstream {url} does not list its models: {error}.",
            hint="start vLLM with --enable-scale-out and wait until it answers /health",
        ) from error
    finally:
        await engine.close()
    return {model.name: _target(model) for model in models}


def _target(model: ServedModel) -> Target:
    is_adapter = model.parent is not None
    # An adapter's own name is its version.
    return Target(model.name, None, 0, model.name, model.name if is_adapter else None, is_adapter)
