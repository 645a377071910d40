"""The tables of docs/gpus.md are the planner's."""

from __future__ import annotations

from tests.support.gpu_table import PAGE, with_tables


def test_the_page_shows_the_planner_s_tables() -> None:
    page = PAGE.read_text()
    assert page == with_tables(page), "run: python -m tests.support.gpu_table"
