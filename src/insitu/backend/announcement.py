"""The lines that `insitu serve` prints once it is ready."""

from __future__ import annotations

from collections.abc import Iterator

from insitu.backend.plan.settings import ServeSettings
from insitu.backend.serving.host import ModelHost
from insitu.system.tls import scheme_of


def announcement(settings: ServeSettings, host: ModelHost | None, seconds: float) -> Iterator[str]:
    """Say what is served where, `seconds` after the start."""
    where = f"{settings.device}, {settings.dtype}, {settings.placement} devices, {settings.publication}"
    scheme = scheme_of(settings.tls)
    for port in settings.gateway_ports:
        use = "OpenAI protocol, recorded" if port == settings.gateway_port else "its share of the rollouts"
        yield f"gateway  {scheme}://{settings.host}:{port}/v1   {use}"
    yield f"api      {scheme}://{settings.host}:{settings.port}/v1   runs, groups, steps, jobs; /docs"
    if host is None:
        yield "model    none yet: the first registration loads one"
    else:
        for replica in host.replicas.replicas.values():
            yield f"engine   {replica.id} vLLM pid {replica.pid} at {replica.engine.url} ({where})"
            batch = f"a batch of {host.engine.max_num_seqs} calls"
            yield f"warm     {replica.id} answered {batch} in {replica.warm_up_seconds:.0f} s"
        for rank in host.trainer.ranks:
            yield f"trainer  rank {rank['rank']} pid {rank['pid']} on {rank['device']}"
        yield f"model    {host.engine.served_name}"
    for teacher in settings.teachers:
        yield f"teacher  {teacher.name} at {teacher.url}"
    yield f"state    {settings.state_dir}   logs in {settings.logs_dir}"
    yield f"ready after {seconds:.0f} s"
