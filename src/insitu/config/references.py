"""Names in `finetuning` that must exist elsewhere in the file."""

from __future__ import annotations

from collections.abc import Iterator

from insitu import plugins
from insitu.config.values.problems import Problem
from insitu.json_values import as_object

PARTS = {
    "trainer": "trainers",
    "trajectory_builder": "trajectory_builders",
    "trainer_adapter": "trainer_adapters",
}


def reference_problems(config: object) -> list[Problem]:
    """List every missing or unknown name. `config` is a Config, or a mapping that does not validate as one.

    `target_functions` are not checked: a workflow may label functions while it runs.
    """
    finetuning = _get(config, "finetuning")
    if not is_true(_get(finetuning, "enabled")):
        return []
    return list(_check(config, finetuning))


def _check(config: object, finetuning: object) -> Iterator[Problem]:
    for field, section in PARTS.items():
        yield from _named(_get(finetuning, field), ("finetuning", field), section, _get(config, section))
    reward_function = _get(finetuning, "reward_function")
    evaluators = _get(_get(config, "eval"), "evaluators")
    if reward_function is None:
        known = _keys(evaluators)
        listed = (
            f"; it names an entry of `eval.evaluators` (it has: {', '.join(known)})"
            if known
            else ("; name the reward: `reward: module:function`, or an entry of `eval.evaluators`")
        )
        yield Problem(("finetuning", "reward_function"), f"required when finetuning.enabled is true{listed}")
    elif (name := _get(reward_function, "name")) is not None:
        yield from _named(name, ("finetuning", "reward_function", "name"), "eval.evaluators", evaluators)
    target = _get(finetuning, "target_model")
    if target is not None:
        yield from _named(target, ("finetuning", "target_model"), "llms", _get(config, "llms"))


def _named(name: object, location: tuple[str, ...], section: str, entries: object) -> Iterator[Problem]:
    if name is None:
        known = _keys(entries)
        yield Problem(
            location,
            f"required when finetuning.enabled is true; it names an entry of `{section}`"
            + (f" (it has: {', '.join(known)})" if known else ""),
        )
    elif isinstance(name, str) and (known := _keys(entries)) is not None and name not in known:
        yield Problem(
            location,
            f"`{section}` has no entry `{name}`{plugins.nearest(name, known)}"
            + (f" (it has: {', '.join(known)})" if known else " (it is empty)"),
        )


def _keys(entries: object) -> list[str] | None:
    """Return the names in a section; None if it is no mapping, which is reported elsewhere."""
    mapping = {} if entries is None else as_object(entries)
    return None if mapping is None else [str(key) for key in mapping]


def _get(node: object, key: str) -> object:
    mapping = as_object(node)
    return getattr(node, key, None) if mapping is None else mapping.get(key)


def is_true(value: object) -> bool:
    """Return True for what the models read as true, before they have."""
    return value is True or str(value).lower() in {"true", "yes", "on", "1"}
