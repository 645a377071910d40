"""A sample of the families, one of each kind, is in the table as the trainer and vLLM's own classes have it.

All of them: `make families`, which writes the table.
"""

from __future__ import annotations

import json

import pytest

from tests.gates.families.look import FIGURES, TABLE, in_a_process
from tests.gates.gate import gate

SAMPLE = ("qwen3", "qwen3_moe", "qwen3_5", "lfm2", "glm4", "gemma2", "stablelm")
"""Dense, experts, a wrapper of a hybrid, a hybrid, a layer left out, shaped logits, rejected."""


@pytest.mark.timeout(400)
def test_the_table_says_what_both_sides_do() -> None:
    table = json.loads(TABLE.read_text())
    largest = dict.fromkeys(FIGURES, 0.0)
    for line in in_a_process(*SAMPLE, seconds=390):
        assert line["row"] == table[line["name"]], "write it: make families"
        largest = {name: max(found, line["figures"][name]) for name, found in largest.items()}
    for name, bound in FIGURES.items():
        gate(f"families-{name}", largest[name], bound, "from the plain model")
