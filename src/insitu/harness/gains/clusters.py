"""Clusters: examples that belong together, by `eval.general.cluster_key`."""

from __future__ import annotations

from collections.abc import Sequence

from insitu.datasets.example import Example
from insitu.errors import InvalidRequest
from insitu.plugins import nearest


def read_clusters(examples: Sequence[Example], key: str | None) -> dict[str, str] | None:
    """Return the cluster of each example by its id; None without a key."""
    if key is None:
        return None
    for example in examples:
        if key not in example.row:
            raise InvalidRequest(
                f"eval.general.cluster_key names {key!r}, which example {example.id!r} does not have"
                f"{nearest(key, list(example.row))}",
                hint=f"name a field that every row has, or add {key!r} to the dataset",
            )
    return {example.id: str(example.row[key]) for example in examples}
