"""Ray under `insitu serve`: start a private local cluster, or join one by address."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from insitu.errors import ChildFailed, DeadlineExceeded, InsituError

_OBJECT_STORE_BYTES = 1 << 29
log = logging.getLogger(__name__)


def start_ray(address: str | None, scratch: Path) -> None:
    """Start or join Ray. Call from the main thread: a local cluster is tied to the thread that started it."""
    # Actors set their own threads and devices; Ray must not hide GPUs from trainer ranks that share them.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # engines and trainer are not background work
    if address is not None:
        ray.init(address=address, namespace="insitu", log_to_driver=False, logging_level=logging.ERROR)
        return
    ray.init(
        namespace="insitu",
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=_OBJECT_STORE_BYTES,
        _temp_dir=str(scratch / "ray"),
    )


def stop_ray() -> None:
    """Disconnect from Ray; a cluster started here shuts down."""
    ray.shutdown()


class ActorDied(ChildFailed):
    """A Ray actor is gone: killed, crashed, or its node lost."""


async def gather(references: list[Any], deadline_seconds: float, what: str) -> list[Any]:
    """Wait for all results; raise the first failure, or DeadlineExceeded naming `what`."""
    pending = [asyncio.ensure_future(_result(reference)) for reference in references]
    try:
        async with asyncio.timeout(deadline_seconds):
            return list(await asyncio.gather(*pending))
    except TimeoutError as error:
        raise DeadlineExceeded(f"{what} did not finish in {deadline_seconds:.0f} s") from error
    except RayActorError as error:
        raise ActorDied(f"{what} failed: a Ray actor died ({_first_line(error)})") from error
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, InsituError):
            raise cause from error
        raise ChildFailed(f"{what} failed: {type(cause).__name__}: {cause}") from error
    finally:
        for task in pending:
            task.cancel()


async def _result(reference: Any) -> Any:
    return await reference


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def kill(actor: Any) -> None:
    """Kill an actor at once; an already dead one is no error."""
    ray.kill(actor, no_restart=True)
