"""Old rollouts go as a whole, nothing that is referred to goes, and the rest unpacks to the same tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from insitu.errors import NotFound
from insitu.records import old_calls
from insitu.records.store import RecordStore
from insitu.types import ModelCall
from tests.unit.records.test_store import conversation, make_call

BEFORE = 100.0


@dataclass
class Rollout:
    calls: list[ModelCall]
    referred: set[str]

    @property
    def goes(self) -> bool:
        return all(call.started_at < BEFORE for call in self.calls) and not self.referred


@st.composite
def rollouts(draw: st.DrawFn) -> list[Rollout]:
    """Conversations whose turns extend each other, branches of them, and single calls; of any ages."""
    made: list[Rollout] = []
    for number in range(draw(st.integers(0, 6))):
        name = draw(st.sampled_from([f"ro{number}", None]))
        turns = conversation(draw(st.integers(1, 5)), turn_tokens=3)
        if draw(st.booleans()):
            turns += [replace(turn, output_ids=[99, 98, 97]) for turn in turns[1:]]
        if name is None:
            turns = turns[:1]
        ages = draw(st.lists(st.sampled_from([0.0, 50.0, 99.5, 100.0, 150.0]), min_size=1, max_size=4))
        calls = [
            replace(turn, id=f"c{number}-{at}", rollout_id=name, started_at=ages[at % len(ages)])
            for at, turn in enumerate(turns)
        ]
        referred = draw(st.sets(st.sampled_from([call.id for call in calls]), max_size=2))
        made.append(Rollout(calls, referred if draw(st.booleans()) else set()))
    return made


def sweep(store: RecordStore, referred: set[str], before: float = BEFORE) -> list[str]:
    found = list(store.find_old(before, lambda _: referred))
    deleted = store.delete_old(found, before, lambda _: referred)
    return [call_id for gone in deleted for call_id in gone.call_ids]


@pytest.mark.parametrize("page", [2, 500])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(made=rollouts(), data=st.data())
def test_exactly_the_old_rollouts_go(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    page: int,
    made: list[Rollout],
    data: st.DataObject,
) -> None:
    monkeypatch.setattr(old_calls, "_PAGE", page)
    store = RecordStore(f"sqlite:///{tmp_path_factory.mktemp('store')}/calls.db")
    # Turns in order, rollouts interleaved in any way.
    queues = [list(rollout.calls) for rollout in made]
    order: list[ModelCall] = []
    while open_ := [queue for queue in queues if queue]:
        order.append(data.draw(st.sampled_from(open_)).pop(0))
    if page == 2:  # reading stops at a page without an old call: what was recorded late goes later
        order = [replace(call, started_at=0.0 if call.started_at < BEFORE else BEFORE) for call in order]
        order.sort(key=lambda call: call.started_at)
    store.append(order)
    before = {call.id: call for call in store.get([call.id for call in order])}
    referred = {call_id for rollout in made for call_id in rollout.referred}
    gone = sweep(store, referred)
    assert sorted(gone) == sorted(call.id for rollout in made if rollout.goes for call in rollout.calls)
    left = [call_id for call_id in before if call_id not in gone]
    assert store.exists(list(before)) == set(left)
    assert store.get(left) == [before[call_id] for call_id in left]
    tokens = store.tokens(left)
    assert all(call.parent_id is None or call.parent_id in tokens for call in tokens.values())
    assert sweep(store, referred) == []
    store.close()


def test_a_call_that_began_meanwhile_keeps_its_rollout(tmp_path: Path) -> None:
    """Found as old, then continued by another process, then deleted: the new call stays whole."""
    store, other = (RecordStore(f"sqlite:///{tmp_path}/calls.db") for _ in range(2))
    first, second, third = conversation(3)
    other.append([replace(first, started_at=0.0)])
    found = list(store.find_old(BEFORE, lambda _: ()))
    assert [rollout.call_ids for rollout in found] == [["c0"]]
    other.append([replace(second, started_at=BEFORE)])
    assert store.delete_old(found, BEFORE, lambda _: ()) == []
    assert store.delete_old(found, BEFORE + 1, lambda _: {"c1"}) == []
    assert len(store.get(["c0", "c1"])) == 2
    # Deleted while the other process still remembers the conversation.
    assert sorted(sweep(store, set(), BEFORE + 1)) == ["c0", "c1"]
    other.append([make_call("alone", "other"), third])
    assert store.get(["c2"]) == [third]
    assert store.tokens(["c2"])["c2"].parent_id is None


def test_a_batch_continues_a_deleted_conversation(tmp_path: Path) -> None:
    """The first call of the batch is stored whole, the next one against it."""
    store, other = (RecordStore(f"sqlite:///{tmp_path}/calls.db") for _ in range(2))
    turns = conversation(5)
    other.append(turns[:2])
    assert len(sweep(store, set())) == 2
    other.append(turns[2:])
    assert store.get(["c2", "c3", "c4"]) == turns[2:]
    tokens = store.tokens(["c4"])
    assert tokens["c2"].parent_id is None
    assert (tokens["c3"].parent_id, tokens["c4"].parent_id) == ("c2", "c3")


def test_a_missing_call_is_explained(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/calls.db"
    with pytest.raises(NotFound, match="x-insitu-call-id") as plain:
        RecordStore(url).get(["gone"])
    assert "--keep-calls" not in str(plain.value)
    kept = RecordStore(url, keep_seconds=30 * 86_400)
    for read in (kept.get, kept.tokens):
        with pytest.raises(NotFound, match="keeps calls for 30 d only \\(insitu serve --keep-calls\\)"):
            read(["gone"])


def test_space_of_deleted_calls_is_used_again(tmp_path: Path) -> None:
    path = tmp_path / "calls.db"
    store = RecordStore(f"sqlite:///{path}")
    sizes: list[int] = []
    for number in range(4):
        calls = [
            make_call(f"c{number}-{n}", f"r{number}-{n}", prompt_ids=list(range(5000))) for n in range(100)
        ]
        store.append(calls)
        store.close()  # writes the WAL to the file
        sizes.append(path.stat().st_size)
        assert len(sweep(store, set())) == 100
    assert sizes[-1] < 1.2 * sizes[0]


def test_a_run_is_read_while_its_calls_are_deleted(tmp_path: Path) -> None:
    store = RecordStore(f"sqlite:///{tmp_path}/calls.db")
    store.append([make_call(f"c{n}", f"r{n}", started_at=0.0 if n else BEFORE) for n in range(1200)])
    reading = store.of_run("run", 0)
    assert next(reading).id == "c0"
    sweep(store, set())
    assert len(list(reading)) == 499  # the rest of the part that was read already
