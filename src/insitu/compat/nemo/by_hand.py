"""Manual steps before a migrated configuration trains, with the YAML to write."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from insitu.compat.nemo import original
from insitu.compat.nemo.marked_text import MarkedText
from insitu.compat.nemo.note import Note, note_at
from insitu.compat.nemo.notes import trained_entries
from insitu.config.dump import to_yaml
from insitu.config.values.problems import Location, Problem
from insitu.config.values.secret import hide, without_credentials
from insitu.config.values.tree import section, value_at
from insitu.json_values import JsonObject, JsonValue

_SECTIONS_OF_CODE = ("workflow", "functions")
_VARIABLE = re.compile(r"\$\{\w+\}")


def advice(marked: MarkedText, problem: Problem, source: JsonObject) -> Note:
    """Explain how to fix a problem in the new file."""
    location = problem.location
    if location and location[-1] == "_type":
        entry = section(value_at(source, location[:-1]))
        type_name = entry.get("_type", entry.get("type"))
        if isinstance(type_name, str):
            found = _component(location[:-1], type_name, entry)
            if found is not None:
                return note_at(marked, location, found[0], type_name, found[1])
    return note_at(marked, location, problem.text)


def _component(place: Location, type_name: str, entry: JsonObject) -> tuple[str, str | None] | None:
    if place[0] in _SECTIONS_OF_CODE:
        text = (
            f"`{type_name}` is one of the toolkit's agents. Build it with your framework "
            "(docs/frameworks.md) in `async def NAME(question, context)`, and refer to that function:"
            if type_name in original.AGENTS
            else f"`{type_name}` is registered in the toolkit only. Turn its inner function into a plain "
            '`async def NAME(question, context)`, take the LLM from `context.client("langchain")` instead of '
            "`builder.get_llm(...)`, and refer to it:"
        )
        return text, _written(place, _python(type_name, entry))
    if place[:2] == ("eval", "evaluators"):
        return _evaluator(place, type_name, entry)
    if place[0] == "llms":
        return _llm(place, type_name, entry)
    if type_name.startswith(original.DPO_PREFIXES):
        text = (
            "insitu does not train on preference pairs. Use the rewards per turn as step rewards "
            "(docs/evaluation.md), with `_type: insitu` for the three parts"
        )
        return text, None
    return None


def _evaluator(place: Location, type_name: str, entry: JsonObject) -> tuple[str, str]:
    judge = original.EVALUATORS.get(type_name)
    llm = entry.get("llm_name") or entry.get("llm")
    if judge is not None and isinstance(llm, str):
        new: JsonObject = {
            "_type": judge,
            "llm": llm,
            "prompt": entry.get("judge_llm_prompt") or "WHAT A GOOD OUTPUT IS",
        }
        text = (
            f"`{type_name}` exists in the toolkit only. The closest evaluator here is a judge; "
            "say in its prompt what counts:"
        )
        return text, _written(place, new)
    text = (
        f"`{type_name}` is registered in the toolkit only. Turn its `evaluate_item` into a plain function "
        "`def NAME(item)` that returns the score (item.output, item.expected, item.row), and refer to it:"
    )
    return text, _written(place, _python(type_name, entry))


def _llm(place: Location, type_name: str, entry: JsonObject) -> tuple[str, str]:
    address, key = original.LLM_TYPES.get(type_name, ("http://HOST:PORT/v1", "${API_KEY}"))
    model = entry.get("model_name") or entry.get("model") or entry.get("azure_deployment") or "MODEL"
    kept = {name: entry[name] for name in ("temperature", "top_p", "max_tokens", "seed") if name in entry}
    new: JsonObject = {
        "_type": "openai",
        "model_name": model,
        "base_url": entry.get("base_url") or address,
        "api_key": key,
    }
    text = f"models are called over the OpenAI protocol. Write `{type_name}` as such an endpoint:"
    return text, _written(place, new | kept)


def _python(type_name: str, entry: JsonObject) -> JsonObject:
    name = re.sub(r"\W", "_", type_name) or "run"
    new: JsonObject = {
        "_type": "python",
        "entry": f"my_module:{name if name[0].isalpha() else f'_{name}'}",
    }
    llm = entry.get("llm") or entry.get("llm_name")
    if isinstance(llm, str):
        new["llm"] = llm
    args: JsonObject = {
        key: value for key, value in entry.items() if key not in ("_type", "type", "llm", "llm_name")
    }
    if args:
        new["args"] = args
    return new


def needed_by_hand(marked: MarkedText, source: JsonObject) -> list[Note]:
    """List what loads but cannot train."""
    return [*_generations(marked, source), *_no_trained_entry(marked, source), *_files(marked, source, ())]


def _generations(marked: MarkedText, source: JsonObject) -> Iterator[Note]:
    for name, entry in section(source.get("trajectory_builders")).items():
        if section(entry).get("num_generations") == 1:
            location = ("trajectory_builders", name, "num_generations")
            text = (
                "a single rollout has nothing to be compared with; the toolkit compared different examples. "
                "Write:"
            )
            yield note_at(marked, location, text, 1, "num_generations: 8")


def _no_trained_entry(marked: MarkedText, source: JsonObject) -> Iterator[Note]:
    llms = section(source.get("llms"))
    names, run, base = trained_entries(source)
    finetuning = section(source.get("finetuning"))
    adapters = section(source.get("trainer_adapters"))
    known = {
        name: section(each).get("model_name") or section(each).get("model") for name, each in llms.items()
    }
    if names or not llms or None in known.values() or finetuning.get("trainer_adapter") not in adapters:
        return  # unknown because of a variable, or reported already
    text = (
        f"no entry is the model being trained (run `{run}` of `{base}`). In the one your agent calls, write:"
    )
    yield note_at(marked, ("llms",), text, yaml=f"model_name: {json.dumps(base)}")


def _files(marked: MarkedText, node: JsonValue, location: Location) -> Iterator[Note]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _files(marked, value, (*location, str(key)))
    elif isinstance(node, str) and node.startswith("file://"):
        yield note_at(
            marked,
            location,
            "the toolkit reads the text from this file; insitu does not. Write the text itself",
        )


def _written(place: Location, values: JsonObject) -> str:
    """Format an entry as YAML, under its own name."""
    document: JsonObject = hide(values)
    # The name of a variable is not a secret.
    document |= {key: value for key, value in values.items() if _VARIABLE.fullmatch(str(value))}
    for part in reversed(place):
        outer: JsonObject = {str(part): document}
        document = outer
    return without_credentials(to_yaml(document).rstrip())
