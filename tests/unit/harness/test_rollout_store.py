"""Rollouts on disk: nothing that was written is lost, and nothing heavy stays in memory."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from insitu.errors import InsituError, InvalidRequest
from insitu.harness.files.json_lines import DamagedFile
from insitu.harness.files.rollout_store import RolloutStore, Stored
from insitu.harness.rollouts.rollout import Rollout, RolloutFigures
from insitu.types import Ending
from tests.support.rollouts import line_of, rollout_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "epoch-0000.jsonl"


CALL = {
    "id": "c1",
    "finish_reason": "stop",
    "messages": [],
    "answer": {},
    "prompt_ids": [1, 2],
    "output_ids": [3],
    "logprobs": [-0.1],
}


def record(rollout_id: str = "r1", **changes: Any) -> dict[str, Any]:
    """A rollout as a line with its tokens in it."""
    given = {
        "rollout_id": rollout_id,
        "example_id": "e1",
        "index": 0,
        "generation": 0,
        "attempt": 0,
        "ending": Ending.COMPLETED,
        "reward": 0.5,
        "reason": "",
        "output": {"answer": "4"},
        "call_ids": ["c1"],
        "calls": [CALL],
        "metadata": {"num_calls": 1, "num_output_tokens": 1, "policy_steps": [0]},
        "seconds": 1.5,
        "started_at": 100.0,
    }
    missing = dict.fromkeys(("input", "expected", "reasoning"))
    return missing | {"dropped": {}, "call_rewards": {}} | given | changes


def rollout(rollout_id: str = "r1", **changes: Any) -> Rollout:
    return rollout_of(record(rollout_id, **changes))


def test_a_rollout_comes_back_whole_and_is_light(path: Path) -> None:
    with RolloutStore(path) as store:
        assert store.append(rollout(expected="4")) == store.rollouts()[0] == rollout(expected="4")
    with RolloutStore(path) as store:
        (found,) = store.rollouts()
        assert line_of(found) == record(expected="4")
    assert found == rollout()
    assert found.ending is Ending.COMPLETED
    assert (found.reward, found.call_ids, found.figures) == (0.5, ("c1",), RolloutFigures(1, 1, (0,)))
    assert (found.index, found.generation, found.attempt, found.example_id) == (0, 0, 0, "e1")
    assert (found.seconds, found.started_at, found.details().expected) == (1.5, 100.0, "4")
    assert isinstance(found.source, Stored), "outputs and calls stay on the disk"


def test_last_line_of_a_rollout_wins(path: Path) -> None:
    with RolloutStore(path) as store:
        store.append(rollout("r1", reward=None))
        store.append(rollout("r2", index=1))
        store.append(rollout("r1", reward=1.0, output="scored"))
        check_last_wins(store)
    with RolloutStore(path) as store:
        check_last_wins(store)


def check_last_wins(store: RolloutStore) -> None:
    assert [(e.rollout_id, e.reward) for e in store.rollouts()] == [("r1", 1.0), ("r2", 0.5)]
    assert [e.reward for e in store.group(0)] == [1.0]
    assert [e.rollout_id for e in store.group(1)] == ["r2"]
    assert store.group(7) == []
    assert store.rollouts()[0].details().output == "scored"


def test_a_rollout_reads_its_calls_when_asked(path: Path) -> None:
    with RolloutStore(path) as store:
        found = store.append(rollout(ending="length"))
    assert found.trainable
    assert (found.rollout_id, found.reward, found.ending) == ("r1", 0.5, Ending.LENGTH)
    assert found.read_calls()[0]["id"] == "c1"
    assert found.episode[-1].logprobs == [-0.1]
    with RolloutStore(path) as store:
        assert store.rollouts()[0] == found


def test_failed_rollout_has_no_reward(path: Path) -> None:
    with RolloutStore(path) as store:
        failed = rollout(
            ending=Ending.TIMEOUT, reward=None, reason="600 s", calls=[], call_ids=[], output=None
        )
        found = store.append(failed)
    assert found.reward is None
    assert found.reason == "600 s"
    assert not found.trainable
    assert found.read_calls() == []


def test_cut_at_every_byte_of_the_last_three_records(path: Path) -> None:
    records = [record(f"r{n}", index=n, output="ü\n" * n) for n in range(5)]
    with RolloutStore(path) as store:
        for one in records:
            store.append(rollout_of(one))
    whole = path.read_bytes()
    ends = [0]
    for line in whole.splitlines(keepends=True):
        ends.append(ends[-1] + len(line))
    for cut in range(ends[-4], len(whole) + 1):
        path.write_bytes(whole[:cut])
        left = sum(end <= cut for end in ends) - 1
        with RolloutStore(path) as store:
            assert [line_of(e) for e in store.rollouts()] == records[:left], cut
            assert store.torn_bytes == cut - ends[left]
            assert line_of(store.append(rollout("after"))) == record("after")


def test_damage_inside_is_fatal(path: Path) -> None:
    with RolloutStore(path) as store:
        first = store.append(rollout("r1"))
        store.append(rollout("r2"))
    path.write_bytes(path.read_bytes().replace(b"r1", b'"1'))
    with pytest.raises(DamagedFile, match="line 1, at byte 0"):
        RolloutStore(path)
    with pytest.raises(DamagedFile, match="no record at byte 0"):
        first.read_calls()


def test_line_that_is_no_rollout_is_fatal(path: Path) -> None:
    path.write_bytes(b'{"rollout_id": "r1"}\n')
    with pytest.raises(DamagedFile, match="at byte 0: KeyError: 'example_id'"):
        RolloutStore(path)


def test_another_rollout_in_its_place_is_noticed(path: Path) -> None:
    with RolloutStore(path) as store:
        found = store.append(rollout("r1"))
    path.write_bytes(path.read_bytes().replace(b"r1", b"r2"))
    with pytest.raises(DamagedFile, match="another rollout than r1"):
        found.read_calls()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_does_not_have_are_refused_by_place(path: Path, bad: float) -> None:
    with RolloutStore(path) as store:
        with pytest.raises(InvalidRequest, match="the reward is"):
            store.append(replace(rollout(), reward=bad))
        with pytest.raises(InvalidRequest, match=r"record\.output\.x\[1\] is"):
            store.append(rollout(output={"x": [1.0, bad]}))
        with pytest.raises(InvalidRequest, match=r"record\.calls\[0\]\.logprobs\[2\] is"):
            store.append(rollout(calls=[CALL | {"output_ids": [1, 2, 3], "logprobs": [-1.0, -2.0, bad]}]))
        assert store.rollouts() == []
    assert path.read_bytes() == b""
    assert not path.with_suffix(".tokens").exists()


@pytest.mark.parametrize(
    "changes", [{"ending": "fine"}, {"reward": "0.5"}, {"index": None}, {"call_ids": [5]}, {"seconds": "1"}]
)
def test_what_could_not_be_read_back_is_refused(path: Path, changes: dict[str, Any]) -> None:
    with RolloutStore(path) as store:
        with pytest.raises(InvalidRequest):
            store.append(replace(rollout(), **changes))
        with pytest.raises(InvalidRequest):
            store.append(rollout(output=object()))
    assert path.read_bytes() == b""


def test_output_nested_without_end_is_refused(path: Path) -> None:
    endless: list[Any] = []
    endless.append(endless)
    with RolloutStore(path) as store, pytest.raises(InvalidRequest):
        store.append(rollout(output=endless))


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(_json)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_any_json_comes_back_as_it_was(path: Path, output: Any) -> None:
    path.unlink(missing_ok=True)
    with RolloutStore(path) as store:
        store.append(rollout(output=output))
        store.append(rollout("r2"))
    with RolloutStore(path) as store:
        assert store.rollouts()[0].details().output == output


def test_odd_texts_and_large_numbers_come_back(path: Path) -> None:
    output = {"lone": "\ud800", "large": 2**80, "line": "a\u2028b\r\n\0"}
    with RolloutStore(path) as store:
        store.append(rollout(output=output))
    with RolloutStore(path) as store:
        assert store.rollouts()[0].details().output == output


def test_closed_store_still_reads(path: Path) -> None:
    with RolloutStore(path) as store:
        store.append(rollout())
    assert store.closed
    assert line_of(store.rollouts()[0]) == record()
    size = path.with_suffix(".tokens").stat().st_size
    with pytest.raises(InsituError, match="is closed"):
        store.append(rollout("r2"))
    assert path.with_suffix(".tokens").stat().st_size == size


def test_memory_stays_flat(path: Path) -> None:
    heavy = [{"id": "c1", "text": "x" * 200_000}]
    with RolloutStore(path) as store:
        for n in range(100):
            store.append(rollout(f"r{n}", index=n, calls=heavy))
    assert path.stat().st_size > 20_000_000
    tracemalloc.start()
    try:
        with RolloutStore(path) as store:
            rollouts = store.rollouts()
            for each in rollouts:
                assert len(each.read_calls()) == 1
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(rollouts) == 100
    assert kept < 500_000
    assert peak < 3_000_000


def test_appended_rollouts_survive_kill(path: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from insitu.harness.files.rollout_store import RolloutStore\n"
        "from insitu.harness.rollouts.rollout import InMemory, Rollout, RolloutDetails\n"
        "from insitu.types import Ending\n"
        "call = {'id': 'c', 'prompt_ids': [1] * 900, 'output_ids': [2] * 99, 'logprobs': [-1.0] * 99}\n"
        "held = InMemory(RolloutDetails(output='x' * 5000, calls=[call]))\n"
        "store = RolloutStore(Path(sys.argv[1]))\n"
        "for n in range(10**6):\n"
        "    store.append(Rollout(f'r{n}', 'e', 0, Ending.COMPLETED, 0.5, index=n, source=held))\n"
        "    print(n, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as out:
        seen = [int(out.readline()) for _ in range(50)]
        process.send_signal(signal.SIGKILL)
        seen += [int(line) for line in out.read().split()]
    process.wait(30)
    with RolloutStore(path) as store:
        rollouts = store.rollouts()
    assert [e.index for e in rollouts][: len(seen)] == seen
    assert all(e.read_calls()[0]["output_ids"] == [2] * 99 for e in rollouts)
