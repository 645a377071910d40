"""Migrate a configuration of the original harness to insitu, changing only what cannot be kept.

text ─► rewrite ─► check ─► leave out what no model knows or honours ─┐
                    ▲                                                 │ until nothing more is found
                    └─────────────────────────────────────────────────┘
     ─► what is still wrong: by hand · what was without effect there · what means something else
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from insitu import plugins
from insitu.compat.nemo import original
from insitu.compat.nemo.by_hand import advice, needed_by_hand
from insitu.compat.nemo.marked_text import MarkedText
from insitu.compat.nemo.note import Note, note_at
from insitu.compat.nemo.notes import changed_meaning, newly_effective
from insitu.config.load import check
from insitu.config.values.interpolation import interpolate
from insitu.config.values.problems import (
    NOT_HONOURED,
    UNKNOWN_KEY,
    UNSET_VARIABLE,
    Location,
    Problem,
)
from insitu.config.values.tree import put, section, value_at
from insitu.errors import InvalidRequest
from insitu.json_values import JsonObject, JsonValue


@dataclass(slots=True)
class Migration:
    """The new text and all notes on it."""

    text: str
    by_hand: list[Note] = field(default_factory=list[Note])
    """While any remain, the new file does not load or does not train."""
    takes_effect: list[Note] = field(default_factory=list[Note])
    """Settings without effect there that have one here."""
    rewritten: list[Note] = field(default_factory=list[Note])
    left_out: list[Note] = field(default_factory=list[Note])
    changed_meaning: list[Note] = field(default_factory=list[Note])
    unset_variables: list[Note] = field(default_factory=list[Note])
    """Not an error here: they may be set where the file is used."""


@dataclass(slots=True)
class _Checked:
    source: JsonObject
    """The values, with the file's own text where a variable is not set."""
    problems: list[Problem]
    unset: list[Problem]


def migrate(text: str, where: str, environment: Mapping[str, str]) -> Migration:
    """Return the new text and its notes. Raises InvalidRequest if the text is not a YAML mapping."""
    plugins.load_entry_points()
    try:
        marked = MarkedText(text, where)
    except InvalidRequest as error:
        if "${" in text and not error.hint:
            error.hint = (
                'write variables in quotes: "${VAR}"; the toolkit replaces them before it parses the YAML'
            )
        raise
    first = MarkedText(text, where)
    result = Migration(text)
    _rewrite(marked, first, result)
    stuck: set[Location] = set()
    checked = _check(marked, environment)
    while _leave_out(marked, first, checked, result, stuck):
        checked = _check(marked, environment)
    result.text = marked.text
    result.unset_variables = [note_at(first, each.location, each.text) for each in checked.unset]
    # Show values as the file writes them: the values of variables must not leak.
    result.by_hand += [advice(first, each, marked.document) for each in checked.problems]
    result.by_hand += needed_by_hand(first, checked.source)
    result.takes_effect = newly_effective(first, marked.document)
    result.changed_meaning = changed_meaning(first, checked.source)
    for notes in (
        result.by_hand,
        result.takes_effect,
        result.left_out,
        result.rewritten,
        result.changed_meaning,
    ):
        notes.sort(key=lambda note: note.line or sys.maxsize)
    return result


def _check(marked: MarkedText, environment: Mapping[str, str]) -> _Checked:
    """Find the problems, except at places whose value is unknown because a variable is not set."""
    read = interpolate(marked.document, environment)
    unset = [each for each in read.problems if each.kind == UNSET_VARIABLE]
    problems = [each for each in read.problems if each.kind != UNSET_VARIABLE]
    found = check(read.value, read.texts)[1]
    unknown = {each.location for each in unset}
    problems += [each for each in found if each.location not in unknown]
    for location in unknown:
        put(read.value, location, value_at(marked.document, location))
    return _Checked(read.value, problems, unset)


def _leave_out(
    marked: MarkedText, first: MarkedText, checked: _Checked, result: Migration, stuck: set[Location]
) -> bool:
    """Comment out what no model knows or honours; return True if anything changed."""
    changed = False
    for problem in checked.problems:
        location = problem.location
        if problem.kind not in (UNKNOWN_KEY, NOT_HONOURED) or not location or location in stuck:
            continue
        reason = _reason(problem)
        if marked.drop(location, reason):
            changed = True
            result.left_out.append(note_at(first, location, reason))
            _needed_anyway(first, location, result)
        else:
            stuck.add(location)
    return changed


def _reason(problem: Problem) -> str:
    if problem.kind == NOT_HONOURED:
        return problem.text.partition(" (it is ")[0].removesuffix("; remove it")
    place = original.place_of(problem.location)
    if place in original.WHY_DROPPED:
        return original.WHY_DROPPED[place]
    holder = original.place_of(problem.location[:-1])
    near = problem.text.removeprefix("unknown key") if "did you mean" in problem.text else ""
    if holder in original.STRICT:
        return f"unknown to insitu and to the toolkit{near}"
    return f"ignored by the toolkit, unknown to insitu{near}"


def _needed_anyway(first: MarkedText, location: Location, result: Migration) -> None:
    """Add a note if the user has to replace what was left out."""
    if location[0] in original.HAND_SECTIONS and len(location) == 1:
        text = "copy the sections of that file into this one"
        if location[0] != "base":
            text = "if your workflow uses it, create it in your function"
        result.by_hand.append(note_at(first, location, text))
    elif location[:3] == ("eval", "general", "dataset") and location[-1] == "s3":
        text = "download the file and set file_path to it"
        result.by_hand.append(note_at(first, location, text))


def _rewrite(marked: MarkedText, first: MarkedText, result: Migration) -> None:
    """Rewrite what insitu spells differently, and remove `llms` keys that would be sent to the model."""
    _rename_types(marked, first, result)
    for name, entry in _mappings(marked.document.get("llms")):
        _clean_llm(marked, first, result, name, entry)
    for name, entry in _mappings(marked.document.get("trainer_adapters")):
        location = ("trainer_adapters", name, "backend", "ip")
        ip = section(entry.get("backend")).get("ip")
        if isinstance(ip, str) and "@" in ip and marked.replace(location, ip.rpartition("@")[2]):
            text = "reduced to the host: api_key is sent with every request"
            result.rewritten.append(note_at(first, location, text))
    _target_model(marked, first, result)


def _clean_llm(
    marked: MarkedText, first: MarkedText, result: Migration, name: str, entry: JsonObject
) -> None:
    reasons = {key: reason for key, reason in original.LLM_KEYS.items() if key in entry}
    for kept, other in (("max_retries", "num_retries"), ("model_name", "model")):
        if kept in entry and other in entry:
            reasons[other] = f"the same setting as {kept}, which stays"
    for key, reason in reasons.items():
        if marked.drop(("llms", name, key), reason):
            result.left_out.append(note_at(first, ("llms", name, key), reason))


def _rename_types(marked: MarkedText, first: MarkedText, result: Migration) -> None:
    """Rename `type`, which the original also accepts, to `_type`."""
    document = marked.document
    places: list[Location] = [("workflow",), ("eval", "general", "dataset")]
    sections = ("llms", "functions", "trajectory_builders", "trainer_adapters", "trainers")
    places += [(section, name) for section in sections for name, _ in _mappings(document.get(section))]
    evaluators = section(document.get("eval")).get("evaluators")
    places += [("eval", "evaluators", name) for name, _ in _mappings(evaluators)]
    for place in places:
        entry = document
        for part in place:
            entry = section(entry.get(str(part)))
        if entry.get("type") is not None and marked.rename((*place, "type"), "_type"):
            result.rewritten.append(note_at(first, (*place, "type"), "written `_type` here"))


def _target_model(marked: MarkedText, first: MarkedText, result: Migration) -> None:
    """Replace the model name that the original expects with the name of its `llms` entry."""
    target = section(marked.document.get("finetuning")).get("target_model")
    llms = dict(_mappings(marked.document.get("llms")))
    if not isinstance(target, str) or target in llms:
        return
    called = [name for name, llm in llms.items() if target in (llm.get("model_name"), llm.get("model"))]
    location = ("finetuning", "target_model")
    if len(called) == 1 and marked.replace(location, called[0]):
        text = f"`{called[0]}`: the entry of `llms`, where the toolkit expects the name of its model"
        result.rewritten.append(note_at(first, location, text))


def _mappings(value: JsonValue) -> list[tuple[str, JsonObject]]:
    """Return the named mappings of a section of the file."""
    return [(str(name), entry) for name, entry in section(value).items() if isinstance(entry, dict)]
