"""Apply what is known of a model to the settings of `insitu serve`: its family, and the memory plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from insitu.backend.plan.cpu_plan import make_cpu_plan
from insitu.backend.plan.device_plan import make_plan
from insitu.backend.plan.devices import machine
from insitu.backend.plan.engine import EngineSettings, apply_arguments
from insitu.backend.plan.fit import Plan
from insitu.backend.plan.layouts import Wanted
from insitu.backend.plan.models.files import CannotPlan, read_kind
from insitu.backend.plan.models.shapes import read_shape
from insitu.backend.plan.settings import Deadlines, ServeSettings
from insitu.errors import CannotHonour
from insitu.training.model.families import Family, families
from insitu.wire.values import DEADLINES

_SUPPORTED = "choose a model of another family, from docs/models.md"


def with_family(settings: ServeSettings, model: str) -> tuple[ServeSettings, list[str]]:
    """Return the settings for the model's family and what to tell of it; reject what it does not allow."""
    kind = read_kind(model)
    name = kind.model_type
    if kind.quantization_config is not None:
        raise CannotHonour(
            f"the files of {model} are quantised, and training on them was never tried",
            hint="give a copy of the model in 16 bits; --four-bit-base makes four bits of it for the trainer",
        )
    family = families().get(name or "")
    if family is None:
        named = "has no config.json that names its family"
        if name is not None:
            _check_loads(model, name)
            named = f"is of the family {name}, which was never tried (docs/models.md)"
        return settings, [
            f"model: {model} {named}; layers that the engine does not serve fail at the first publication"
        ]
    _check_family(settings, model, family)
    lines: list[str] = []
    if family.experts or family.left_out:
        without = ["the experts"] * family.experts + list(family.left_out)
        lines.append(
            f"adapters: on {', '.join(family.adapts)} of this {family.name} model; "
            f"without {', '.join(without)}"
        )
    if family.untried is not None:
        lines.append(f"model: {family.name} was not tried {family.untried}")
    return replace(settings, hybrid=family.hybrid, lora_modules=family.adapts), lines


def _check_loads(model: str, name: str) -> None:
    """Reject a family of which the installed Transformers has no text model."""
    try:
        from transformers import __version__
        from transformers.models.auto import modeling_auto as auto
    except ImportError:  # the trainer runs elsewhere
        return
    known = (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    if not any(name in names for names in known):
        raise CannotHonour(
            f"{model} is of the family {name}, of which Transformers {__version__} has no model that writes "
            "text",
            hint=_SUPPORTED,
        )


def _check_family(settings: ServeSettings, model: str, family: Family) -> None:
    if family.rejected is not None:
        raise CannotHonour(
            f"{model} is of the family {family.name}, which cannot be trained and served: {family.rejected}",
            hint=_SUPPORTED,
        )
    if settings.publication == "merged" and not family.merged:
        on_cpu = settings.device == "cpu"
        asked = "--publication merged, a CPU's default" if on_cpu else "--publication merged"
        raise CannotHonour(
            f"{asked}: the files of {model} name their weights otherwise than the trainer has them "
            f"({family.name}), so merged weights cannot be written",
            hint="serve it on a GPU: vLLM's build for CPUs computes no adapters beside experts"
            if on_cpu and family.experts
            else "use --publication adapter",
        )
    if settings.num_ranks > 1 and not family.several_ranks:
        raise CannotHonour(
            f"--trainer-ranks {settings.num_ranks}: the files of {model} name their weights otherwise than "
            f"the trainer has them ({family.name}), so several ranks cannot each read their part",
            hint="use --trainer-ranks 1",
        )


def planned(settings: ServeSettings, model: str) -> tuple[ServeSettings, Plan | None]:
    """Plan for this model on CUDA. A model that the planner does not know needs the user's own figures."""
    if settings.machine is None or settings.wanted is None:
        return settings, None
    try:
        plan = make_plan(read_shape(model), settings.machine, settings.wanted)
    except CannotPlan:
        if not _all_given(settings.wanted):
            raise
        return _unplanned(settings), None
    return _with(settings, plan), plan


def registered_engine(
    settings: ServeSettings,
    base: EngineSettings,
    engine_args: Mapping[str, object],
    init_args: Mapping[str, object],
    lora_rank: int,
) -> EngineSettings:
    """Return the engine that a registration asks for; if it changes any setting, the others are planned."""
    asked = apply_arguments(base, engine_args, init_args, lora_rank)
    same = asked == base and lora_rank <= base.max_lora_rank
    if same or settings.machine is None or settings.wanted is None:
        return asked
    named = {*engine_args, *init_args}
    wanted = replace(
        settings.wanted,
        lora_rank=max(asked.max_lora_rank, lora_rank),
        compiled=not asked.enforce_eager,
        **{name: value for name, value in _pinned(asked).items() if name in named},
    )
    changed, plan = planned(replace(settings, wanted=wanted), asked.model)
    if plan is None:
        return asked
    return replace(
        asked,
        max_model_len=changed.max_seq_length,
        max_num_seqs=changed.max_num_seqs,
        tensor_parallel_size=changed.tensor_parallel_size,
        gpu_memory_utilization=changed.gpu_memory_utilization,
    )


def settings_for(settings: ServeSettings, engine: EngineSettings) -> ServeSettings:
    """Return the settings of replicas and trainer beside exactly this engine."""
    settings = replace(settings, deadlines=_deadlines(settings.deadlines, engine))
    budget = engine.micro_batch_tokens or settings.micro_batch_tokens
    if settings.machine is None or settings.wanted is None:
        return replace(settings, micro_batch_tokens=budget)
    pinned = {name: value for name, value in _pinned(engine).items() if value is not None}
    wanted = replace(
        settings.wanted, lora_rank=engine.max_lora_rank, compiled=not engine.enforce_eager, **pinned
    )
    changed, plan = planned(replace(settings, wanted=wanted), engine.model)
    if plan is not None:
        return changed
    return replace(settings, micro_batch_tokens=budget, checkpoint_layers=changed.checkpoint_layers)


def _deadlines(deadlines: Deadlines, engine: EngineSettings) -> Deadlines:
    """Apply the deadlines that a registration sets."""
    set_ = {name.removesuffix("_seconds"): getattr(engine, name) for name in DEADLINES}
    return replace(deadlines, **{name: seconds for name, seconds in set_.items() if seconds is not None})


def _with(settings: ServeSettings, plan: Plan) -> ServeSettings:
    layout = plan.layout
    threads = max(1, settings.compute.rank_threads * settings.num_ranks // layout.num_ranks)
    return replace(
        settings,
        compute=replace(settings.compute, rank_threads=threads),
        num_replicas=layout.num_replicas,
        num_ranks=layout.num_ranks,
        tensor_parallel_size=layout.tensor_parallel_size,
        gpu_memory_utilization=plan.gpu_memory_utilization,
        max_seq_length=plan.max_seq_length,
        max_num_seqs=plan.max_num_seqs,
        micro_batch_tokens=plan.micro_batch_tokens,
        checkpoint_layers=plan.checkpoint_layers,
        kept_tokens=plan.kept_tokens,
    )


def _unplanned(settings: ServeSettings) -> ServeSettings:
    """Without a plan nobody knows what layers hold, so they are checkpointed unless that is switched off."""
    return replace(settings, checkpoint_layers=settings.checkpoint_layers is not False)


def _pinned(engine: EngineSettings) -> dict[str, int | float | None]:
    """Return the engine's settings by the planner's names, which are those of a registration."""
    return {
        "max_seq_length": engine.max_model_len,
        "max_num_seqs": engine.max_num_seqs,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "micro_batch_tokens": engine.micro_batch_tokens,
    }


def _all_given(wanted: Wanted) -> bool:
    given = (wanted.max_seq_length, wanted.micro_batch_tokens, wanted.gpu_memory_utilization)
    return all(value is not None for value in given)


def planned_cpu(settings: ServeSettings, model: str, asked_length: int | None) -> ServeSettings:
    """Reject what the RAM or the model does not hold; the default length is at most the model's."""
    try:
        shape = read_shape(model)
    except CannotPlan:
        return _unplanned(settings)
    plan = make_cpu_plan(
        shape,
        machine.host_memory(),
        settings.dtype,
        max_seq_length=asked_length,
        micro_batch_tokens=settings.micro_batch_tokens,
        checkpoint_layers=settings.checkpoint_layers,
        num_replicas=settings.num_replicas,
        num_ranks=settings.num_ranks,
    )
    return replace(settings, max_seq_length=plan.max_seq_length, checkpoint_layers=plan.checkpoint_layers)
