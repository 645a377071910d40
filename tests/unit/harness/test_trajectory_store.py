"""Rollouts on disk: nothing that was written is lost, and nothing heavy stays in memory."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from insitu.errors import InsituError, InvalidRequest, NotFound
from insitu.harness.files.json_lines import DamagedFile
from insitu.harness.files.trajectory_store import TrajectoryStore
from insitu.types import Ending


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "epoch-0000.jsonl"


def record(rollout_id: str = "r1", **changes: Any) -> dict[str, Any]:
    return {
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
        "calls": [{"id": "c1", "finish_reason": "stop", "messages": [], "answer": {}, "logprobs": [-0.1]}],
        "metadata": {"reasoning": "right"},
        "seconds": 1.5,
        "started_at": 100.0,
        **changes,
    }


def test_record_comes_back_whole_and_entry_is_light(path: Path) -> None:
    with TrajectoryStore(path) as store:
        assert store.append(record(expected="4")) == store.entries()[0]
    with TrajectoryStore(path) as store:
        (entry,) = store.entries()
        assert store.read("r1") == record(expected="4")
    assert entry.ending is Ending.COMPLETED
    assert (entry.reward, entry.call_ids, entry.metadata) == (0.5, ("c1",), {"reasoning": "right"})
    assert (entry.index, entry.generation, entry.attempt, entry.example_id) == (0, 0, 0, "e1")
    assert (entry.seconds, entry.started_at, entry.expected) == (1.5, 100.0, "4")
    assert not hasattr(entry, "output")
    assert not hasattr(entry, "calls")


def test_last_line_of_a_rollout_wins(path: Path) -> None:
    with TrajectoryStore(path) as store:
        store.append(record("r1", reward=None))
        store.append(record("r2", index=1))
        store.append(record("r1", reward=1.0, output="scored"))
        check_last_wins(store)
    with TrajectoryStore(path) as store:
        check_last_wins(store)


def check_last_wins(store: TrajectoryStore) -> None:
    assert [(e.rollout_id, e.reward) for e in store.entries()] == [("r1", 1.0), ("r2", 0.5)]
    assert [e.reward for e in store.group(0)] == [1.0]
    assert [e.rollout_id for e in store.group(1)] == ["r2"]
    assert store.group(7) == []
    assert store.read("r1")["output"] == "scored"


def test_trajectory_reads_its_calls_when_asked(path: Path) -> None:
    with TrajectoryStore(path) as store:
        trajectory = store.trajectory(store.append(record(ending="length")))
    assert trajectory.trainable
    assert (trajectory.rollout_id, trajectory.reward, trajectory.ending) == ("r1", 0.5, Ending.LENGTH)
    assert trajectory.read_calls()[0]["id"] == "c1"
    assert trajectory.episode[-1].logprobs == [-0.1]
    with TrajectoryStore(path) as store:
        assert store.trajectory(store.entries()[0]) == trajectory


def test_failed_rollout_has_no_reward(path: Path) -> None:
    with TrajectoryStore(path) as store:
        failed = record(
            ending=Ending.TIMEOUT, reward=None, reason="600 s", calls=[], call_ids=[], output=None
        )
        trajectory = store.trajectory(store.append(failed))
    assert trajectory.reward is None
    assert trajectory.reason == "600 s"
    assert not trajectory.trainable
    assert list(trajectory.read_calls()) == []


def test_cut_at_every_byte_of_the_last_three_records(path: Path) -> None:
    records = [record(f"r{n}", index=n, output="ü\n" * n) for n in range(5)]
    with TrajectoryStore(path) as store:
        for one in records:
            store.append(one)
    whole = path.read_bytes()
    ends = [0]
    for line in whole.splitlines(keepends=True):
        ends.append(ends[-1] + len(line))
    for cut in range(ends[-4], len(whole) + 1):
        path.write_bytes(whole[:cut])
        left = sum(end <= cut for end in ends) - 1
        with TrajectoryStore(path) as store:
            assert [store.read(e.rollout_id) for e in store.entries()] == records[:left], cut
            assert store.torn_bytes == cut - ends[left]
            store.append(record("after"))
            assert store.read("after") == record("after")


def test_damage_inside_is_fatal(path: Path) -> None:
    with TrajectoryStore(path) as store:
        first = store.append(record("r1"))
        store.append(record("r2"))
    path.write_bytes(path.read_bytes().replace(b"r1", b'"1'))
    with pytest.raises(DamagedFile, match="line 1, at byte 0"):
        TrajectoryStore(path)
    with pytest.raises(DamagedFile, match="no record at byte 0"):
        store.trajectory(first).read_calls()


def test_line_that_is_no_rollout_is_fatal(path: Path) -> None:
    path.write_bytes(b'{"rollout_id": "r1"}\n')
    with pytest.raises(DamagedFile, match="at byte 0: KeyError: 'example_id'"):
        TrajectoryStore(path)


def test_another_rollout_in_its_place_is_noticed(path: Path) -> None:
    with TrajectoryStore(path) as store:
        trajectory = store.trajectory(store.append(record("r1")))
    path.write_bytes(path.read_bytes().replace(b"r1", b"r2"))
    with pytest.raises(DamagedFile, match="another rollout than r1"):
        trajectory.read_calls()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_does_not_have_are_refused_by_place(path: Path, bad: float) -> None:
    with TrajectoryStore(path) as store:
        with pytest.raises(InvalidRequest, match="the reward is"):
            store.append(record(reward=bad))
        with pytest.raises(InvalidRequest, match=r"record\.output\.x\[1\] is"):
            store.append(record(output={"x": [1.0, bad]}))
        with pytest.raises(InvalidRequest, match=r"record\.calls\[0\]\.logprobs\[2\] is"):
            store.append(record(calls=[{"logprobs": [-1.0, -2.0, bad]}]))
        assert store.entries() == []
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    "changes", [{"ending": "fine"}, {"reward": "0.5"}, {"index": None}, {"output": object()}, {"call_ids": 5}]
)
def test_what_could_not_be_read_back_is_refused(path: Path, changes: dict[str, Any]) -> None:
    with TrajectoryStore(path) as store:
        with pytest.raises(InvalidRequest):
            store.append(record(**changes))
    assert path.read_bytes() == b""


def test_output_nested_without_end_is_refused(path: Path) -> None:
    endless: list[Any] = []
    endless.append(endless)
    with TrajectoryStore(path) as store, pytest.raises(InvalidRequest):
        store.append(record(output=endless))


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(_json)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_any_json_comes_back_as_it_was(path: Path, output: Any) -> None:
    path.unlink(missing_ok=True)
    with TrajectoryStore(path) as store:
        store.append(record(output=output))
        store.append(record("r2"))
    with TrajectoryStore(path) as store:
        assert store.read("r1")["output"] == output


def test_odd_texts_and_large_numbers_come_back(path: Path) -> None:
    output = {"lone": "\ud800", "large": 2**80, "line": "a\u2028b\r\n\0"}
    with TrajectoryStore(path) as store:
        store.append(record(output=output))
    with TrajectoryStore(path) as store:
        assert store.read("r1")["output"] == output


def test_unknown_rollout(path: Path) -> None:
    with TrajectoryStore(path) as store, pytest.raises(NotFound, match="r9"):
        store.read("r9")


def test_closed_store_still_reads(path: Path) -> None:
    with TrajectoryStore(path) as store:
        store.append(record())
    assert store.closed
    assert store.read("r1") == record()
    with pytest.raises(InsituError, match="is closed"):
        store.append(record("r2"))


def test_memory_stays_flat(path: Path) -> None:
    heavy = [{"id": "c1", "text": "x" * 200_000}]
    with TrajectoryStore(path) as store:
        for n in range(100):
            store.append(record(f"r{n}", index=n, calls=heavy))
    assert path.stat().st_size > 20_000_000
    tracemalloc.start()
    try:
        with TrajectoryStore(path) as store:
            trajectories = [store.trajectory(entry) for entry in store.entries()]
            for trajectory in trajectories:
                assert len(trajectory.read_calls()) == 1
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(trajectories) == 100
    assert kept < 500_000
    assert peak < 3_000_000


def test_appended_rollouts_survive_kill(path: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from insitu.harness.files.trajectory_store import TrajectoryStore\n"
        "store = TrajectoryStore(Path(sys.argv[1]))\n"
        "for n in range(10**6):\n"
        "    store.append({'rollout_id': f'r{n}', 'example_id': 'e', 'index': n, 'generation': 0,\n"
        "                  'ending': 'completed', 'reward': 0.5, 'output': 'x' * 5000})\n"
        "    print(n, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as out:
        seen = [int(out.readline()) for _ in range(50)]
        process.send_signal(signal.SIGKILL)
        seen += [int(line) for line in out.read().split()]
    process.wait(10)
    with TrajectoryStore(path) as store:
        assert [e.index for e in store.entries()][: len(seen)] == seen
