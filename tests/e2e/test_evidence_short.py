"""The evidence of a benchmark task, in two small updates: that it is measured, not that the model learns."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.evidence import short_run, train
from tests.support.backend import Backend


@pytest.mark.timeout(400)
async def test_a_short_part_is_measured(tmp_path: Path, backend: Backend) -> None:
    began = time.monotonic()
    result = await train(short_run(tmp_path), backend)
    print(f"short part of {result['part']} in {time.monotonic() - began:.0f} s", flush=True)
    assert result["complete"]
    assert [point["step"] for point in result["curve"]] == [1, 2]
    assert result["rollouts"] == 32
    assert (result["before"]["step"], result["after"]["step"]) == (0, 2)
    for side in ("before", "after"):
        assert (result[side]["num_examples"], result[side]["num_failed"]) == (8, 0)
        assert 0.0 <= result[side]["success"] <= result[side]["figures"]["found"] <= 1.0
    assert result["gain"]["num_examples"] == 8
