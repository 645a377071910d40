"""Pages of rollouts: every order and filter visits each matching rollout once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from insitu.errors import DeadlineExceeded, InvalidRequest
from insitu.view.answers.comparison import compare_view
from insitu.view.answers.groups import group_page
from insitu.view.answers.rollouts import rollouts_view
from insitu.view.reading.query import ROLLOUT_ORDERS, Filters, make_cursor
from insitu.wire.views.rollouts import RolloutRow


def every(
    viewed: Any, filters: Filters | None = None, sort: str = "oldest", limit: int = 7
) -> list[RolloutRow]:
    found: list[RolloutRow] = []
    cursor, total = None, None
    while True:
        page = rollouts_view(viewed, filters or Filters(), sort, cursor, limit)
        assert total in (None, page.total), "the count is that of the first page"
        assert len(page.rollouts) <= limit
        found += page.rollouts
        cursor, total = page.next, page.total
        if cursor is None:
            assert len(found) == total
            return found


@pytest.mark.parametrize("sort", ROLLOUT_ORDERS)
def test_an_order_visits_every_rollout_once(viewed, sort):
    rows = every(viewed, sort=sort)
    assert len({row.rollout_id for row in rows}) == len(rows)
    with_reward = [row for row in every(viewed, limit=200) if row.reward is not None]
    expected = len(with_reward) if sort in ("best", "worst") else 90
    assert len(rows) == expected
    keys: dict[str, Callable[[RolloutRow], Any]] = {
        "best": lambda row: -row.reward,
        "worst": lambda row: row.reward,
        "longest": lambda row: -row.num_output_tokens,
    }
    if sort in keys:
        assert [keys[sort](row) for row in rows] == sorted(keys[sort](row) for row in rows)


def test_the_oldest_order_is_that_of_the_run(viewed):
    rows = every(viewed)
    stores = list(dict.fromkeys(row.store for row in rows))
    assert stores[:3] == ["validation-0000", "epoch-0000-step-0000", "epoch-0000-step-0001"]
    assert [row.rollout_id for row in every(viewed, sort="newest")] == [row.rollout_id for row in rows][::-1]
    first = [(row.index, row.generation) for row in rows if row.store == stores[1]]
    assert first == sorted(first)


FILTERS: list[tuple[Filters, Callable[[RolloutRow], bool]]] = [
    (Filters(store="epoch-0001-step-0000"), lambda row: row.store == "epoch-0001-step-0000"),
    (Filters(epoch=1), lambda row: row.epoch == 1),
    (Filters(kind="validation"), lambda row: row.store.startswith("validation-")),
    (Filters(kind="training", index=2), lambda row: row.store.startswith("epoch-") and row.index == 2),
    (Filters(ending="length"), lambda row: row.ending == "length"),
    (Filters(fate="trained"), lambda row: row.fate == "trained"),
    (Filters(reason="truncated"), lambda row: row.reason == "truncated"),
    (Filters(min_reward=0.3), lambda row: row.reward is not None and row.reward >= 0.3),
    (Filters(max_reward=0.0), lambda row: row.reward == 0.0),
    (Filters(text="TEN?"), lambda row: "ten?" in row.answer),
    (Filters(text="not plugged in"), lambda row: "not plugged in" in row.failure),
    (Filters(example_id="row-3"), lambda row: row.example_id == "row-3"),
    (Filters(text="50%_'\"; DROP TABLE rollouts"), lambda _row: False),
]


@pytest.mark.parametrize(("filters", "holds"), FILTERS, ids=[str(each[0])[8:60] for each in FILTERS])
def test_filters(viewed, filters, holds):
    expected = [row.rollout_id for row in every(viewed, limit=200) if holds(row)]
    assert [row.rollout_id for row in every(viewed, filters)] == expected
    assert expected or filters.text, "the run has such rollouts"


def test_counts_for_the_filters(viewed):
    """Each menu counts what its choices would show beside the other filters."""
    every_row = every(viewed, limit=200)
    page = rollouts_view(viewed, Filters(epoch=0), "oldest", None, 5)
    rows = [row for row in every_row if row.epoch == 0]
    assert page.endings == {name: sum(row.ending == name for row in rows) for name in page.endings}
    assert sum(page.endings.values()) == sum(page.reasons.values()) == page.total == len(rows)
    assert page.reasons["failed"] == sum(row.reason == "failed" for row in rows)
    failed = rollouts_view(viewed, Filters(reason="failed"), "oldest", None, 5)
    assert sum(failed.reasons.values()) == len(every_row), "its own menu still offers the other reasons"
    assert failed.endings == Counter(row.ending for row in every_row if row.reason == "failed")
    assert rollouts_view(viewed, Filters(text="nobody said this"), "oldest", None, 5).endings == {}


@pytest.mark.parametrize("sort", ["oldest", "newest", "spread"])
def test_groups_are_paged_too(viewed, sort):
    found, cursor = [], None
    while True:
        page = group_page(viewed, Filters(kind="training"), sort, cursor, 4)
        found += page.groups
        cursor = page.next
        if cursor is None:
            break
    assert len({(each.store, each.index) for each in found}) == len(found) == page.total == 18
    if sort == "spread":
        spreads = [(each.reward_max or 0.0) - (each.reward_min or 0.0) for each in found]
        assert spreads == sorted(spreads, reverse=True)


@pytest.mark.parametrize(
    "cursor",
    [
        "x",
        "é",
        "e30",
        "W10",
        make_cursor("best", [1, 2]),
        make_cursor("oldest", [1, 2]),
        make_cursor("oldest", [[]] * 5),
    ],
)
def test_cursors_of_other_lists_are_rejected(viewed, cursor):
    with pytest.raises(InvalidRequest, match="cursor"):
        rollouts_view(viewed, Filters(), "oldest", cursor, 5)


def test_an_order_that_is_not_known(viewed):
    with pytest.raises(InvalidRequest, match="no order is called 'random'"):
        rollouts_view(viewed, Filters(), "random", None, 5)


def test_a_query_that_takes_too_long_is_ended(viewed, monkeypatch):
    monkeypatch.setattr("insitu.view.reading.index._READ_SECONDS", 0.05)
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT max(x) FROM n"
    with pytest.raises(DeadlineExceeded, match="did not answer within"):
        viewed.index.read(lambda db: db.execute(endless).fetchone())


def test_a_comparison_has_the_paired_interval_of_evaluation(viewed):
    """The same function as `insitu eval` and the end of a run: same samples, same interval."""
    from insitu.harness.gains.gain import compare
    from insitu.harness.gains.measurement import Measurement

    rows = every(viewed, limit=200)
    sides = [
        Measurement.of((row.example_id, row.reward) for row in rows if row.store == store)
        for store in ("validation-0000", "validation-0003")
    ]
    expected = compare(*sides)
    assert expected is not None
    assert expected.interval is None, "six examples are too few for one"
    view = compare_view(viewed, "validation-0000", viewed, "validation-0003", None, 4)
    assert view.gain is not None
    assert (view.gain.difference, view.gain.low, view.gain.high) == (
        expected.difference,
        None,
        None,
    )
    assert view.gain.verdict == expected.outcome
    assert view.total == 6
    second = compare_view(viewed, "validation-0000", viewed, "validation-0003", view.next, 4)
    examples = [*view.examples, *second.examples]
    assert len({each.example_id for each in examples}) == 6
    sizes = [abs(each.difference or 0.0) for each in examples]
    assert sizes == sorted(sizes, reverse=True)
    assert view.configuration == []
