"""Files as datasets: which type reads them."""

from __future__ import annotations

from pathlib import Path

from insitu.errors import InvalidRequest
from insitu.evaluation.dataset_config import FileDatasetConfig
from insitu.plugins import ComponentConfig, Kind, find

TYPE_BY_SUFFIX = {
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
    ".xls": "xls",
    ".xlsx": "xls",
}


def dataset_config(path: str | Path, base: ComponentConfig | None = None) -> ComponentConfig:
    """The dataset of another file, with the ids, filters and structure of `base`.

    A base that reads its file with a function of the user's keeps doing so; otherwise the type is told
    by the file's extension.
    """
    kept = {name: getattr(base, name) for name in ("id_key", "filter", "structure") if hasattr(base, name)}
    if base is not None and not isinstance(base, FileDatasetConfig) and getattr(base, "file_path", None):
        fields = {name: getattr(base, name) for name in type(base).model_fields}
        return type(base).model_validate(fields | {"file_path": Path(path)})
    suffix = Path(path).suffix.lower()
    if suffix not in TYPE_BY_SUFFIX:
        raise InvalidRequest(
            f"the type of dataset `{path}` cannot be told from its extension `{suffix}`",
            hint=f"known: {', '.join(TYPE_BY_SUFFIX)}; give others as eval.general.dataset with a _type",
        )
    type_name = TYPE_BY_SUFFIX[suffix]
    return find(Kind.DATASET, type_name).config.model_validate(
        kept | {"_type": type_name, "file_path": Path(path)}
    )
