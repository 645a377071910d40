"""Settings of the original that take effect here for the first time, or have a different effect."""

from __future__ import annotations

from collections.abc import Iterator

from insitu.compat.nemo import original
from insitu.compat.nemo.marked_text import MarkedText
from insitu.compat.nemo.note import Note, note_at
from insitu.config.values.problems import Location
from insitu.config.values.tree import section
from insitu.json_values import JsonObject, JsonValue

_ADAPTER = "trainer_adapters.*.training"


def newly_effective(marked: MarkedText, source: JsonObject) -> list[Note]:
    """List every setting that insitu reads and the original ignored, with its value."""
    notes = [
        note_at(marked, location, _why_effective(location, value), value)
        for location, value in _settings(source, ())
        if _was_ignored(location)
    ]
    notes.append(
        Note("--dataset, --validation_dataset", "fail with a type error in the toolkit; they work here")
    )
    return notes


def _settings(node: JsonValue, location: Location) -> Iterator[tuple[Location, JsonValue]]:
    """Yield every key in the file with its value; a mapping is replaced by its own keys."""
    if not isinstance(node, dict):
        yield location, node
        return
    for key, value in node.items():
        yield from _settings(value, (*location, str(key)))


def _was_ignored(location: Location) -> bool:
    for length in range(1, len(location)):
        holder = original.place_of(location[:length])
        if holder in original.IGNORED:
            return True
        if holder in original.KNOWN and location[length] not in original.KNOWN[holder]:
            return True
    return False


def _why_effective(location: Location, value: JsonValue) -> str:
    holder = original.place_of(location[:-1])
    if holder == _ADAPTER and location[-1] == "learning_rate":
        rate = original.DEFAULT_LEARNING_RATE
        return f"the toolkit always trained with {rate}; write {rate} to train as before"
    if holder == _ADAPTER and location[-1] == "beta":
        kind = "no KL penalty, as before" if not value else "a KL penalty to the base model"
        return f"the toolkit always used 0; here: {kind}"
    if holder == "finetuning.run_configuration":
        return "in the toolkit the command line replaced this section; here it overrides single options"
    return "ignored by the toolkit"


def changed_meaning(marked: MarkedText, source: JsonObject) -> list[Note]:
    """List what reads the same but means something else."""
    finetuning = section(source.get("finetuning"))
    return [
        *_trained_entries(marked, source),
        *_concurrency(marked, source),
        *_curriculum(marked, finetuning),
        *_targets(marked, finetuning),
        *_checkpoints(marked, source),
        Note(
            "validation",
            "also runs after the last update; a failed evaluation is a failure, not a reward of 0",
        ),
        Note("rollouts", "a failed rollout or reward is counted with its reason; it is not a reward of 0"),
        Note("${VAR}", "an unset variable is an error; the toolkit read it as empty text"),
        Note(
            "exit code",
            "0 trained, 1 failed, 130 interrupted; the toolkit exits with 0 even when training failed",
        ),
        Note("the same command again", "resumes an interrupted run; the toolkit started from the beginning"),
    ]


def trained_entries(source: JsonObject) -> tuple[list[str], str, str]:
    """Return the `llms` entries that insitu takes for the trained model, the run's name and base model."""
    finetuning = section(source.get("finetuning"))
    adapter = section(section(source.get("trainer_adapters")).get(str(finetuning.get("trainer_adapter"))))
    backend = section(adapter.get("backend"))
    run = str(backend.get("name") or "trainer_run")
    base = str(backend.get("base_model") or "Qwen/Qwen2.5-7B-Instruct")
    llms = {name: section(each) for name, each in section(source.get("llms")).items()}
    names = [
        name for name, each in llms.items() if (each.get("model_name") or each.get("model")) in (run, base)
    ]
    return names, run, base


def _trained_entries(marked: MarkedText, source: JsonObject) -> Iterator[Note]:
    names, run, base = trained_entries(source)
    for name in names:
        llm = section(section(source.get("llms")).get(name))
        key = "model_name" if "model_name" in llm else "model"
        text = (
            f"agents call the newest weights, under the name of the run (`{run}`), at an address per rollout"
        )
        if llm.get(key) == base and base != run:
            text += f"; in the toolkit they called `{base}`, "
            text += "which is the untrained model unless the server renames it"
        yield note_at(marked, ("llms", name, key), text)
        if "logprobs" in llm:
            yield note_at(marked, ("llms", name, "logprobs"), "not needed: logprobs are always recorded")


def _concurrency(marked: MarkedText, source: JsonObject) -> Iterator[Note]:
    general = section(section(source.get("eval")).get("general"))
    most = general.get("max_concurrency", 8)
    builders = section(source.get("trajectory_builders"))
    chosen = section(builders.get(str(section(source.get("finetuning")).get("trajectory_builder"))))
    count = chosen.get("num_generations", 2)
    if chosen and isinstance(most, int) and isinstance(count, int) and count > 1:
        text = (
            f"{most} rollouts at once in total; the toolkit ran {most} per generation, {most * count} at once"
        )
        yield note_at(marked, ("eval", "general", "max_concurrency"), text)


def _curriculum(marked: MarkedText, finetuning: JsonObject) -> Iterator[Note]:
    curriculum = section(finetuning.get("curriculum_learning"))
    location = ("finetuning", "curriculum_learning")
    if curriculum.get("enabled") is not True:
        text = "groups with equal rewards are dropped even without a curriculum"
        if "min_reward_diff" in curriculum:
            text += "; min_reward_diff itself needs enabled: true, as in the toolkit"
            location = (*location, "min_reward_diff")
        yield note_at(marked, location, text)
    elif curriculum.get("random_subsample") is not None:
        text = "the draw is seeded (finetuning.seed), so that a run can be repeated"
        yield note_at(marked, (*location, "random_subsample"), text)


def _targets(marked: MarkedText, finetuning: JsonObject) -> Iterator[Note]:
    functions = finetuning.get("target_functions")
    if isinstance(functions, list) and functions != ["<workflow>"]:
        text = "name these parts of your code: `with insitu.function(NAME):`, or an entry of `functions`"
        yield note_at(marked, ("finetuning", "target_functions"), text)
    if finetuning.get("target_model") is not None:
        text = "names an entry of `llms`; the toolkit compared it with the name of the model that answered"
        yield note_at(marked, ("finetuning", "target_model"), text)


def _checkpoints(marked: MarkedText, source: JsonObject) -> Iterator[Note]:
    for name, entry in section(source.get("trainer_adapters")).items():
        backend = section(section(entry).get("backend"))
        if backend.get("delete_old_checkpoints") is True:
            location = ("trainer_adapters", name, "backend", "delete_old_checkpoints")
            yield note_at(
                marked, location, "happens once, before training; the newest two and the best one are kept"
            )
