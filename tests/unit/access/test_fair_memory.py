"""A project that fills a memory forgets its own: what others have in it stays."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from insitu.access.fair_memory import FairMemory
from insitu.gateway.protocols.kept_items import KeptItems
from insitu.gateway.recording.tally import Tallies
from insitu.gateway.sampled_ids.history import History


def of(key: str) -> str | None:
    return key.partition("~")[0]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40), st.integers(1, 9)), max_size=80))
def test_nobody_loses_while_another_has_more(puts: list[tuple[str, int, int]]) -> None:
    memory, weights = FairMemory[str, int](of), dict[str, int]()
    for project, number, weight in puts:
        key = f"{project}~{number}"
        if memory.get(key) is None:
            memory.put(key, weight)
            memory.add_weight(key, weight)
            weights[key] = weight
        while memory.weight > 60:
            sums = {name: sum(w for k, w in weights.items() if of(k) == name) for name in map(of, weights)}
            gone, dropped = memory.forget(by_weight=True)
            memory.add_weight(gone, -dropped)
            assert sums[of(gone)] == max(sums.values())
            del weights[gone]
        assert memory.weight == sum(weights.values())
        assert len(memory) == len(weights)


def test_a_flood_of_rollouts_leaves_the_sampled_ids_of_others() -> None:
    history = History(max_rollouts=10, max_tokens=100)
    history.add(("b~ro", "b~run"), array("i", [1, 2]), array("i", [3]))
    for number in range(50):
        history.add((f"a~ro-{number}", "a~run"), array("i", range(20)), array("i", range(20)))
    assert [len(kept.ids) for kept in history.of(("b~ro", "b~run"))] == [3]
    assert history.num_tokens <= 100
    for number in range(50):
        history.add((f"a~short-{number}", "a~run"), array("i", [1]), array("i", [2]))
    assert history.of(("b~ro", "b~run"))
    assert history.num_rollouts <= 10


def test_a_flood_of_rollouts_leaves_the_counts_of_others() -> None:
    tallies = Tallies(10, lambda _tally: None)
    for name in ["b~ro", *(f"a~{number}" for number in range(50))]:
        with tallies.counted(name):
            pass
    assert tallies.find("b~ro") is not None
    assert tallies.find("a~0") is None
    assert tallies.find("a~49") is not None


def test_a_flood_of_answers_leaves_the_items_of_others() -> None:
    kept = KeptItems(1000)
    kept.within("b").keep({}, [{"id": "mine", "text": "x" * 50}])
    for number in range(50):
        kept.within("a").keep({}, [{"id": f"theirs-{number}", "text": "y" * 100}])
    assert kept.within("b").find("mine") is not None
    assert kept.within("a").find("theirs-0") is None
    assert kept.within("a").find("theirs-49") is not None
