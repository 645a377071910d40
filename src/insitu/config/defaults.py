"""Fill in what has one sensible value: the native components, the names between sections, the run's name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path, PurePath

from insitu.config.expand import Expanded
from insitu.config.references import PARTS, is_true
from insitu.config.short_form import ADAPTER, BUILDER, LLM, REWARD, TRAINER
from insitu.config.values.problems import Problem
from insitu.config.values.tree import section
from insitu.json_values import JsonObject, JsonValue, as_object
from insitu.learning_rate import ALPHA, ROLLOUTS, parameters_in_name, recommended_rate
from insitu.system.keys import key_of
from insitu.wire.values import plain_name

NATIVE = "insitu"
NUM_GENERATIONS, GROUPS_PER_STEP, MAX_CONCURRENCY = 8, 8, 64
"""Defaults of the short form (decision 0013); in the long form those of the models apply."""
_OWN_NAMES = {"trainer": TRAINER, "trajectory_builder": BUILDER, "trainer_adapter": ADAPTER}
_SAYS_NOTHING = frozenset({"", "config", "configuration", "finetune", "insitu", "output", "outputs"})
"""Names that the files and folders of many projects share."""


def fill_components(expanded: Expanded) -> None:
    """Add missing components and references, in place, where there is one choice or none is given.

    A file without short keys that does not enable finetuning stays as it is.
    """
    source = expanded.source
    if expanded.written:
        _default(source, ("finetuning",), "enabled", True)
        _default(source, ("eval", "general"), "max_concurrency", MAX_CONCURRENCY)
    finetuning = as_object(source.get("finetuning"))
    if finetuning is None or not is_true(finetuning.get("enabled")):
        return
    for reference, name in PARTS.items():
        if not source.get(name) and finetuning.get(reference) is None:
            source[name] = {_OWN_NAMES[reference]: {}}
            expanded.made.add(name)
        _make_native(as_object(source.get(name)) or {})
        _refer(finetuning, reference, source.get(name))
    if BUILDER in section(source.get("trajectory_builders")) and expanded.owns("trajectory_builders"):
        _default(source, ("trajectory_builders", BUILDER), "num_generations", NUM_GENERATIONS)
        if expanded.written and all(expanded.owns(name) for name in PARTS.values()):
            finetuning.setdefault("groups_per_step", GROUPS_PER_STEP)
    evaluators = section(section(source.get("eval")).get("evaluators"))
    if finetuning.get("reward_function") is None and evaluators:
        chosen = REWARD if "reward" in expanded.written else next(iter(evaluators))
        if chosen == REWARD or len(evaluators) == 1:
            finetuning["reward_function"] = {"name": chosen}
    if "model" in expanded.written and len(section(source.get("llms"))) > 1:
        finetuning.setdefault("target_model", LLM)


def fill_names(expanded: Expanded, path: Path | None, environment: Mapping[str, str]) -> None:
    """Name the run, its model and its directory, in place, if the file leaves them out.

    This comes after overrides: another `finetuning.output_dir` is another run.
    """
    source, finetuning = expanded.source, section(expanded.source.get("finetuning"))
    entry = section(section(source.get("trainer_adapters")).get(ADAPTER))
    if entry.get("_type") != NATIVE or not expanded.owns("trainer_adapters"):
        return
    backend = as_object(entry.setdefault("backend", {}))
    if backend is None or not is_true(finetuning.get("enabled")):
        return
    if "base_model" not in backend:
        _name_model(expanded, backend, finetuning.get("target_model"))
    backend.setdefault("name", _run_name(finetuning.get("output_dir"), path))
    backend.setdefault("api_key", key_of(environment))
    finetuning.setdefault("output_dir", f"output/{backend['name']}")


def fill_rate(expanded: Expanded) -> None:
    """Choose the learning rate, in place, if the file leaves it out and the model's name says its size."""
    finetuning = section(expanded.source.get("finetuning"))
    entry = section(
        section(expanded.source.get("trainer_adapters")).get(str(finetuning.get("trainer_adapter")))
    )
    training = as_object(entry.get("training") if entry.get("training") is not None else {})
    if entry.get("_type") != NATIVE or training is None or not is_true(finetuning.get("enabled")):
        return
    size = parameters_in_name(str(section(entry.get("backend")).get("base_model", "")))
    if size is None or "learning_rate" in training or training.get("method", "grpo") != "grpo":
        return
    builder = section(expanded.source.get("trajectory_builders")).get(
        str(finetuning.get("trajectory_builder"))
    )
    counts = section(builder).get("num_generations"), finetuning.get("groups_per_step")
    rollouts = math.prod(each for each in counts if isinstance(each, int)) if None not in counts else None
    alpha = section(entry.get("lora")).get("alpha")
    entry["training"] = training | {
        "learning_rate": recommended_rate(
            size,
            alpha=alpha if isinstance(alpha, int | float) and alpha > 0 else ALPHA,
            rollouts_per_update=rollouts or ROLLOUTS,
        )
    }


def _make_native(entries: JsonObject) -> None:
    for key, entry in entries.items():
        fields = {} if entry is None else as_object(entry)
        if fields is not None and "_type" not in fields:
            entries[key] = {"_type": NATIVE, **fields}


def _refer(finetuning: JsonObject, reference: str, entries: JsonValue) -> None:
    names = list(section(entries))
    if finetuning.get(reference) is None and len(names) == 1:
        finetuning[reference] = names[0]


def _name_model(expanded: Expanded, backend: JsonObject, target: JsonValue) -> None:
    llms = section(expanded.source.get("llms"))
    chosen = [target] if isinstance(target, str) and target in llms else list(llms)
    names = list(dict.fromkeys(str(_model_name(expanded, name)) for name in chosen))
    if len(names) == 1:
        backend["base_model"] = names[0]
    elif not names:
        expanded.problems.append(Problem(("model",), "is missing; it names the model to train"))
    else:
        text = f"required: which of `llms` is trained? (it has: {', '.join(llms)})"
        expanded.problems.append(Problem(("finetuning", "target_model"), text))


def _model_name(expanded: Expanded, name: str) -> JsonValue:
    """Return the model of an entry of `llms`; of a variable its text, also if it looks like a number."""
    entry = section(section(expanded.source["llms"]).get(name))
    key = "model_name" if "model_name" in entry else "model"
    return expanded.texts.get(("llms", name, key), entry.get(key))


def _run_name(output_dir: JsonValue, path: Path | None) -> str:
    """Name the run after its directory or else its file; one of those that say nothing, after its folder."""
    candidates = [PurePath(output_dir).name] if isinstance(output_dir, str) else []
    if path is not None:
        candidates += [path.stem, path.resolve().parent.name]
    names = [plain_name(each) for each in candidates]
    return next((name for name in names if name not in _SAYS_NOTHING), "run")


def _default(source: JsonObject, place: tuple[str, ...], key: str, value: JsonValue) -> None:
    """Set a key that is missing, unless what is around it is no mapping, which is reported elsewhere."""
    holder = source
    for part in place:
        inner = as_object({} if holder.get(part) is None else holder[part])
        if inner is None:
            return
        holder[part] = holder = inner
    holder.setdefault(key, value)
