"""A backend object for programs written for ART (`openpipe-art` 0.5.18, which cannot train remotely itself).

    backend = InsituBackend("http://127.0.0.1:7623", api_key)
    await model.register(backend)
    result = await backend.train(model, groups, learning_rate=5e-5)

It satisfies ART's `Backend` protocol. The backend matches choices with the recorded calls, so no token is
made here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Protocol

from insitu.client import InsituClient
from insitu.errors import CannotHonour, InvalidRequest, Unavailable
from insitu.json_values import JsonObject, JsonValue
from insitu.system.torch_builds.installing import install_command
from insitu.types import StepSettings, policy_name
from insitu.wire.art import ArtModel, DeleteBody, Deleted, Done, Lenient, TrainBody, TrainReceipt
from insitu.wire.message import Malformed, read_object
from insitu.wire.transport import Connected, Transport

if TYPE_CHECKING:  # ART is not installed where this is checked

    @dataclass
    class TrainResult:
        """ART's own class, as it is called here."""

        step: int
        metrics: dict[str, float]

else:
    try:
        from art.types import TrainResult
    except ImportError as error:
        raise ImportError(
            f"insitu.compat.art needs ART, which cannot be imported: {error}\n"
            f"  next: {install_command('insitu[art]')}"
        ) from error

_OWN_SETTINGS = frozenset(field.name for field in fields(StepSettings))


class AnyModel(Protocol):
    """The attributes of ART's models that are read, trainable or not."""

    name: str
    project: str
    inference_model_name: str | None


class Dumped(Protocol):
    """ART's groups of trajectories: pydantic models."""

    def model_dump(self, *, mode: str) -> object:
        """Return the group as JSON values."""
        ...


class InsituBackend(Connected):
    """One `insitu serve`, as ART's models see a backend."""

    def __init__(
        self, url: str, api_key: str, *, ready_seconds: float = 1200.0, train_seconds: float = 24 * 3600.0
    ) -> None:
        """`ready_seconds` and `train_seconds` bound how long a run may load and a step may take."""
        super().__init__(Transport(url, api_key, request_seconds=600.0))
        self._client = InsituClient(url, api_key)
        self._api_key = api_key
        self._ready_seconds = ready_seconds
        self._train_seconds = train_seconds
        self._steps: dict[str, int] = {}

    async def close(self) -> None:
        """Close the connections. Runs stay open: the next program continues where this one ended."""
        await self._client.close()
        await super().close()

    async def register(self, model: AnyModel) -> None:
        """Register the run of a trainable model; the same settings again are harmless."""
        await self._transport.call(Done, "POST", "/register", body=_encoded(_dumped(model)))

    async def _prepare_backend_for_training(
        self, model: AnyModel, config: Mapping[str, object] | None = None
    ) -> tuple[str, str]:
        """Wait until the run is served; return the gateway's address and key."""
        if config:
            raise CannotHonour(
                f"server settings cannot be changed by a client: {', '.join(sorted(config))}",
                hint="give them to `insitu serve`",
            )
        run = await self._client.wait_run_ready(model.name, self._ready_seconds)
        self._steps[model.name] = run.step
        if (gateway := (await self._client.health()).gateway_url) is None:
            raise Unavailable("the backend has not said where its gateway is", hint="retry later")
        return f"{gateway}/v1", self._api_key

    def _model_inference_name(self, model: AnyModel, step: int | None = None) -> str:
        """Return `name@step`, by default with the last known step; an untrained model keeps its name."""
        if step is None:
            step = self._steps.get(model.name)
        return model.inference_model_name or model.name if step is None else policy_name(model.name, step)

    async def _get_step(self, model: AnyModel) -> int:
        """Return the last committed step."""
        step = (await self._client.get_run(model.name)).step
        self._steps[model.name] = step
        return step

    async def train(
        self, model: AnyModel, trajectory_groups: Iterable[Dumped], **settings: JsonValue
    ) -> TrainResult:
        """Train one step on the groups. A request whose answer is lost is retried and makes no second step.

        `settings` are those of `insitu.types.StepSettings`, or ART's own where they have a counterpart.
        """
        settings.pop("verbose", None)
        own = {name: value for name, value in settings.items() if name in _OWN_SETTINGS}
        body = _train_body(model, trajectory_groups, own, settings)
        answer = await self._transport.call(TrainReceipt, "POST", "/_train_model", body=_encoded(body))
        job = await self._client.wait_job(answer.job, self._train_seconds)
        assert job.step is not None, f"job {job.id} has succeeded"
        self._steps[model.name] = job.step
        metrics = {
            name: float(value) for name, value in job.metrics.items() if isinstance(value, int | float)
        }
        return TrainResult(step=job.step, metrics={**metrics, "account/refused": float(len(answer.refused))})

    async def _delete_checkpoint_files(self, model: AnyModel, steps_to_keep: list[int]) -> None:
        """Delete all checkpoints but those named, the pinned ones and the newest two."""
        body = DeleteBody(model=_dumped(model), steps_to_keep=steps_to_keep)
        await self._transport.call(Deleted, "POST", "/_delete_checkpoint_files", body=_encoded(body))

    def _train_sft(self, *_arguments: object, **_options: object) -> AsyncIterator[dict[str, float]]:
        """Reject the call: there is no supervised training."""
        raise CannotHonour(
            "insitu trains by reinforcement only, not on given texts", hint="use backend.train"
        )


def _train_body(
    model: AnyModel, groups: Iterable[Dumped], own: JsonObject, settings: JsonObject
) -> TrainBody:
    fields = {
        "model": _dumped(model),
        "trajectory_groups": [group.model_dump(mode="json") for group in groups],
        "dev_config": {name: value for name, value in settings.items() if name not in own},
        "insitu": own,
        "wait": False,
    }
    try:
        return read_object(TrainBody, fields)
    except Malformed as error:
        raise InvalidRequest(str(error), hint="pass groups of trajectories, as ART gathers them") from error


def _dumped(model: AnyModel) -> ArtModel:
    """Return what the backend reads of a model; its `config` is the caller's own and need not be JSON."""
    fields = {
        "name": model.name,
        "project": model.project,
        "base_model": getattr(model, "base_model", None),
        "_internal_config": getattr(model, "_internal_config", None),
    }
    try:
        return read_object(ArtModel, fields)
    except Malformed as error:
        raise InvalidRequest(str(error), hint="check its name, project and _internal_config") from error


def _encoded(body: Lenient) -> bytes:
    return body.model_dump_json(by_alias=True).encode()
