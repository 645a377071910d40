"""Names in `finetuning` that must exist elsewhere in the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from insitu import plugins
from insitu.config.values.problems import Problem

PARTS = {
    "trainer": "trainers",
    "trajectory_builder": "trajectory_builders",
    "trainer_adapter": "trainer_adapters",
}


def reference_problems(config: Any) -> list[Problem]:
    """List every missing or unknown name. `config` is a Config, or a mapping that does not validate as one.

    `target_functions` are not checked: a workflow may label functions while it runs.
    """
    finetuning = _get(config, "finetuning")
    if not _is_true(_get(finetuning, "enabled")):
        return []
    return list(_check(config, finetuning))


def _check(config: Any, finetuning: Any) -> Iterator[Problem]:
    for field, section in PARTS.items():
        yield from _named(_get(finetuning, field), ("finetuning", field), section, _get(config, section))
    reward_function = _get(finetuning, "reward_function")
    evaluators = _get(_get(config, "eval"), "evaluators")
    if reward_function is None:
        yield Problem(("finetuning", "reward_function"), "required when finetuning.enabled is true")
    elif (name := _get(reward_function, "name")) is not None:
        yield from _named(name, ("finetuning", "reward_function", "name"), "eval.evaluators", evaluators)
    target = _get(finetuning, "target_model")
    if target is not None:
        yield from _named(target, ("finetuning", "target_model"), "llms", _get(config, "llms"))


def _named(name: Any, location: tuple[str, ...], section: str, entries: Any) -> Iterator[Problem]:
    if name is None:
        yield Problem(location, f"required when finetuning.enabled is true; it names an entry of `{section}`")
    elif isinstance(name, str) and (entries is None or isinstance(entries, Mapping)):
        known = [str(key) for key in cast("Mapping[Any, Any]", entries or {})]
        if name not in known:
            yield Problem(
                location,
                f"`{section}` has no entry `{name}`{plugins.nearest(name, known)}"
                + (f" (it has: {', '.join(known)})" if known else " (it is empty)"),
            )


def _get(node: Any, key: str) -> Any:
    if isinstance(node, Mapping):
        return cast("Mapping[str, Any]", node).get(key)
    return getattr(node, key, None)


def _is_true(value: Any) -> bool:
    return value is True or str(value).lower() in {"true", "yes", "on", "1"}
