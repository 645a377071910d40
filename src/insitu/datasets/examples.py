"""From rows to examples: ids, filters, duplicates, input and expected answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from insitu.datasets.dataset_config import DatasetConfig
from insitu.datasets.example import Example
from insitu.datasets.row_filter import apply_filters, columns_of
from insitu.datasets.text_rows import EXAMPLE_ROW
from insitu.datasets.values import to_jsonable, to_text
from insitu.errors import InvalidRequest
from insitu.json_values import JsonObject, JsonValue
from insitu.plugins import nearest

Row = JsonObject


def to_examples(
    rows: Sequence[Mapping[str, object]], config: DatasetConfig, source: str
) -> tuple[list[Example], list[str]]:
    """Turn rows into examples; also return notes for readers of the results."""
    if not rows:
        raise InvalidRequest(f"{source} has no rows", hint=f"write at least one, such as {EXAMPLE_ROW}")
    clean = [_clean(row, number, source) for number, row in enumerate(rows)]
    ids, notes = _ids(clean, config.id_key, source)
    notes += _check_structure(clean, config, source)
    chosen, more = select(clean, ids, config, source)
    return [_example(clean[at], ids[at], at, config, source) for at in chosen], notes + more


def select(
    rows: Sequence[Mapping[str, object]], ids: Sequence[str], config: DatasetConfig, source: str
) -> tuple[list[int], list[str]]:
    """Return the positions of rows that pass the filters, each id once, and notes on the others."""
    filtered = apply_filters(rows, config.filter)
    first: dict[str, int] = {}
    dropped = [at for at in filtered.kept if first.setdefault(ids[at], at) != at]
    removed = [f"{name} removed {count}" for name, count in filtered.removed.items()]
    if not first:
        raise InvalidRequest(
            f"{source}: the filters removed all {len(rows)} rows: {', '.join(removed)}",
            hint="loosen eval.general.dataset.filter",
        )
    notes = [f"{source}: of {len(rows)} rows, {', '.join(removed)}"] if removed else []
    if dropped:
        num_different = sum(rows[at] != rows[first[ids[at]]] for at in dropped)
        notes.append(
            f"{source}: {len(dropped)} rows dropped because an earlier row has the same id, "
            f"{num_different} of them with other content"
        )
    return list(first.values()), notes


def _clean(row: Mapping[str, object], number: int, source: str) -> Row:
    clean: Row = {}
    for column, value in row.items():
        try:
            clean[str(column)] = to_jsonable(value)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{source}: row {number}, column `{column}`: {error}") from error
    return clean


def _ids(rows: Sequence[Row], key: str, source: str) -> tuple[list[str], list[str]]:
    missing = [number for number, row in enumerate(rows) if row.get(key) in (None, "")]
    if len(missing) == len(rows):
        if key != "id":
            raise InvalidRequest(
                f"{source}: no row has an id in `{key}`{nearest(key, columns_of(rows))}",
                hint=f"columns: {', '.join(columns_of(rows))}",
            )
        return [str(number) for number in range(len(rows))], [
            f"{source}: no row has an id; the row numbers are the ids"
        ]
    if missing:
        raise InvalidRequest(
            f"{source}: {len(missing)} of {len(rows)} rows have no `{key}`, the first is row {missing[0]}",
            hint="give every row an id, or give none and the row numbers become the ids",
        )
    return [_id(row[key], number, source) for number, row in enumerate(rows)], []


def _id(value: JsonValue, number: int, source: str) -> str:
    if isinstance(value, (bool, list, dict)):
        raise InvalidRequest(f"{source}: row {number} has the id {value!r}; an id is text or a number")
    return to_text(value)


def _check_structure(rows: Sequence[Row], config: DatasetConfig, source: str) -> list[str]:
    """Reject columns that no row has; the default answer column may be missing."""
    structure, known = config.structure, columns_of(rows)
    if structure.disable:
        return []
    if structure.question_key not in known:
        raise InvalidRequest(
            f"{source} has no column `{structure.question_key}`{nearest(structure.question_key, known)}",
            hint=f"columns: {', '.join(known)}; choose with structure.question_key, or take whole rows with "
            "structure.disable: true",
        )
    if structure.answer_key in known:
        return []
    if structure.answer_key != type(structure).model_fields["answer_key"].default:
        raise InvalidRequest(
            f"{source} has no column `{structure.answer_key}`{nearest(structure.answer_key, known)}",
            hint=f"columns: {', '.join(known)}; choose with structure.answer_key",
        )
    return [f"{source} has no column `{structure.answer_key}`: the examples have no expected answers"]


def _example(row: Row, example_id: str, number: int, config: DatasetConfig, source: str) -> Example:
    structure = config.structure
    if structure.disable:
        return Example(example_id, row, None, row)
    if row.get(structure.question_key) is None:
        raise InvalidRequest(
            f"{source}: row {number} (id {example_id}) has no `{structure.question_key}`",
            hint="remove the row, or give it one",
        )
    return Example(example_id, row[structure.question_key], row.get(structure.answer_key), row)
