"""Register a run that starts from a step of another."""

from __future__ import annotations

from typing import cast

from insitu.client import InsituClient
from insitu.errors import InvalidRequest
from insitu.types import parse_policy
from insitu.wire.answers import RunInfo
from insitu.wire.values import Scalar


async def fork_run(client: InsituClient, version: str, new: str, *, whole: bool = False) -> RunInfo:
    """Register `new` on the base model, and with the engine, of the run that `version` is a step of.

    `whole`: with the optimizer and the random state of that step, so that the same training goes on.
    """
    name, step = parse_policy(version)
    if step is None:
        raise InvalidRequest(
            f"{version!r} names no step", hint=f"see what is kept: insitu runs show {version}"
        )
    source = await client.get_run(name)
    return await client.register_run(
        new,
        source.base_model,
        project=source.project,
        engine_args=cast("dict[str, Scalar]", source.engine_args),
        init_args=cast("dict[str, Scalar]", source.init_args),
        init_from=None if whole else version,
        fork_from=version if whole else None,
    )
