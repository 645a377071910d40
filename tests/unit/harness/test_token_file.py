"""Tokens beside the lines: compact, exact, and never silently another rollout's."""

from __future__ import annotations

import random
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from insitu.cli.trajectories import trajectories
from insitu.harness.collect.group_builder import GroupBuilder
from insitu.harness.files import rollout_store
from insitu.harness.files.json_lines import DamagedFile
from insitu.harness.files.rollout_store import RolloutStore, read_rollouts
from insitu.harness.interfaces.settings import BuilderConfig
from insitu.harness.rollouts.rollout import InMemory, Rollout, RolloutDetails, RolloutFigures
from insitu.rewards.items import EvalResult
from insitu.testing.standins import StandinParts, make_run
from insitu.types import Ending

EARLIER = Path(__file__).parent / "data" / "tokens_in_lines.jsonl"
"""Written when the tokens were in the lines: a rollout before and after its scoring, and a failed one."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "epoch-0000.jsonl"


def float32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def call(number: int, num_prompt: int, num_output: int, **fields: Any) -> Any:
    """A call as the gateway lists it: logprobs in the engine's own precision."""
    draw = random.Random(number)
    return {
        "id": f"c{number}",
        "finish_reason": "stop",
        "prompt_ids": [draw.randrange(151_000) for _ in range(num_prompt)],
        "output_ids": [draw.randrange(151_000) for _ in range(num_output)],
        "logprobs": [float32(-draw.expovariate(2.0)) for _ in range(num_output)],
        **fields,
    }


def rollout(*calls: Any, rollout_id: str = "r1", reward: float | None = 0.5) -> Rollout:
    source = InMemory(RolloutDetails(calls=calls))
    return Rollout(rollout_id, "e", 0, Ending.COMPLETED, reward, call_ids=("c1",), source=source)


def tokens(path: Path) -> Path:
    return path.with_suffix(".tokens")


def test_tokens_come_back_to_the_last_bit(path: Path) -> None:
    widest = call(3, 0, 2, logprobs=[-0.1, -1e-300])
    calls = [call(1, 5, 3), call(2, 0, 0), widest, call(4, 2**3, 1, prompt_ids=[2**31 - 1] * 8)]
    with RolloutStore(path) as store:
        assert store.append(rollout(*calls)).details(tokens=True).calls == calls
    (found,) = read_rollouts(path)
    assert found.details(tokens=True).calls == calls
    assert not any("prompt_ids" in each or "logprobs" in each for each in found.details().calls)


def test_a_token_takes_less_than_nine_bytes(path: Path) -> None:
    """Six turns of an agent with a system prompt and tool results, as the gateway lists them."""
    calls = [call(1, 900, 350)]
    for number in range(2, 7):
        sharing = {"parent_id": f"c{number - 1}", "shared_tokens": 1, "shared_messages": 0, "shared_tools": 0}
        calls.append(call(number, 250, 350, **sharing))
    count = sum(len(each["prompt_ids"]) + len(each["output_ids"]) for each in calls)
    with RolloutStore(path) as store:
        store.append(rollout(*calls))
    bare = [
        {name: each[name] for name in each if name not in ("prompt_ids", "output_ids", "logprobs")}
        for each in calls
    ]
    with RolloutStore(path.with_name("bare.jsonl")) as store:
        store.append(rollout(*bare))
    lines = path.stat().st_size - path.with_name("bare.jsonl").stat().st_size
    assert (tokens(path).stat().st_size + lines) / count < 7


@pytest.mark.parametrize(
    "odd",
    [
        {"prompt_ids": [2**40]},
        {"output_ids": [1, 2, 3]},
        {"prompt_ids": ["text"]},
        {"logprobs": None},
    ],
)
def test_what_does_not_fit_stays_in_the_line(path: Path, odd: dict[str, Any]) -> None:
    calls = [call(1, 2, 2, **odd), call(2, 2, 2)]
    with RolloutStore(path) as store:
        store.append(rollout(*calls))
    assert read_rollouts(path)[0].details(tokens=True).calls == calls


def test_a_scored_rollout_names_the_same_tokens(path: Path) -> None:
    with RolloutStore(path) as store:
        unscored = store.append(rollout(call(1, 500, 100), reward=None))
        size = tokens(path).stat().st_size
        scored = store.append(unscored.scored(EvalResult("e", 1.0)))
        assert tokens(path).stat().st_size == size
        other = store.append(rollout(call(1, 500, 101)))
    assert scored.read_calls() == unscored.read_calls() == [call(1, 500, 100)]
    assert other.read_calls() == [call(1, 500, 101)]


def test_cut_at_every_byte_after_the_last_line(path: Path) -> None:
    """A crash between the two files leaves tokens that no line names."""
    with RolloutStore(path) as store:
        store.append(rollout(call(1, 3, 2)))
        lines, kept = path.read_bytes(), tokens(path).stat().st_size
        store.append(rollout(call(2, 2, 2), rollout_id="r2"))
    whole = tokens(path).read_bytes()
    for cut in range(kept, len(whole) + 1):
        path.write_bytes(lines)
        tokens(path).write_bytes(whole[:cut])
        with RolloutStore(path) as store:
            assert tokens(path).stat().st_size == kept
            again = store.append(rollout(call(3, 1, 4), rollout_id="r3"))
            assert again.read_calls() == [call(3, 1, 4)]
            assert store.rollouts()[0].read_calls() == [call(1, 3, 2)]


def test_missing_tokens_are_noticed_and_do_not_hold_up_the_run(path: Path) -> None:
    """A power cut may lose what was not synced, of either file; training needs ids of calls alone."""
    with RolloutStore(path) as store:
        store.append(rollout(call(1, 3, 2)))
        kept = tokens(path).stat().st_size
        store.append(rollout(call(2, 2, 2), rollout_id="r2"))
    whole = tokens(path).read_bytes()
    tokens(path).write_bytes(whole[: kept + 5])
    with RolloutStore(path) as store:
        assert store.missing_token_bytes == len(whole) - kept - 5
        store.append(rollout(call(3, 1, 4), rollout_id="r3"))
        first, lost, new = store.rollouts()
    assert first.read_calls() == [call(1, 3, 2)]
    assert new.read_calls() == [call(3, 1, 4)]
    assert lost.trainable
    assert lost.details().calls[0]["id"] == "c2"
    with pytest.raises(DamagedFile, match="block of tokens at byte 37 is missing or was changed"):
        lost.read_calls()
    tokens(path).unlink()
    with pytest.raises(DamagedFile, match="is missing with the whole file"):
        first.read_calls()


def test_every_changed_byte_is_noticed(path: Path) -> None:
    with RolloutStore(path) as store:
        found = store.append(rollout(call(1, 3, 2)))
    whole = tokens(path).read_bytes()
    for at in range(len(whole)):
        tokens(path).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(DamagedFile, match="was changed"):
            found.read_calls()


async def test_resuming_reads_no_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of an epoch is there; the rest is run and scored, and no token of it is read."""
    builder_config = BuilderConfig.model_validate({"_type": "insitu", "num_generations": 2})

    async def collect() -> list[list[Rollout]]:
        run = make_run(tmp_path)
        with run.directory:
            builder = GroupBuilder(builder_config, StandinParts(tmp_path))
            await builder.initialize(run)
            await builder.start_run(run.run_id, epoch=0)
            groups = (await builder.finalize(run.run_id, epoch=0)).trajectories
            await builder.aclose()
        return groups

    before = await collect()
    path = tmp_path / "run" / "trajectories" / "epoch-0000.jsonl"
    half = path.read_bytes().splitlines(keepends=True)[:3]
    path.write_bytes(b"".join(half))
    read: list[Path] = []
    monkeypatch.setattr(rollout_store, "read_tokens", lambda path, *_: read.append(path))
    tokens(path).write_bytes(b"\xff" * tokens(path).stat().st_size)  # nobody would take these for tokens
    after = await collect()
    kept = {each.rollout_id for group in after for each in group} & {
        each.rollout_id for group in before for each in group
    }
    assert (len(kept), sum(map(len, after)), read) == (3, 6, [])


def test_lines_of_earlier_releases_open(path: Path) -> None:
    shutil.copy(EARLIER, path)
    with RolloutStore(path) as store:
        first, failed = store.rollouts()
        assert not tokens(path).exists()
    assert (first.reward, first.call_rewards) == (0.75, (0.0, 1.25))
    assert first.figures == RolloutFigures(3, 7, (0,), first.capture, {"right": 1.0})
    assert first.capture.balanced
    assert first.details().dropped == {"call-3": "other_function"}
    assert first.details().call_rewards == {"call-2": 0.25, "call-3": 1.0}
    one, two, _ = first.read_calls()
    assert two["prompt_ids"] == [*one["prompt_ids"], *one["output_ids"], 6]
    assert (one["logprobs"], two["logprobs"]) == ([-0.010000000707805157, -0.5, -6.0], [-0.1])
    assert [item.content for item in first.episode][:4] == ["Why?", "Because.", "And?", "So."]
    assert (failed.ending, failed.reason, failed.read_calls()) == (Ending.TIMEOUT, "no answer within 9 s", [])


def test_lines_of_earlier_releases_are_continued(path: Path) -> None:
    shutil.copy(EARLIER, path)
    with RolloutStore(path) as store:
        calls = store.rollouts()[0].read_calls()
        store.append(store.rollouts()[0].scored(EvalResult("e", 0.25)))
        store.append(replace(rollout(call(1, 3, 2), rollout_id="new"), index=1))
    with RolloutStore(path) as store:
        first, failed, new = store.rollouts()
    assert first.reward == 0.25
    assert first.read_calls() == calls
    assert failed.read_calls() == []
    assert new.read_calls() == [call(1, 3, 2)]


def test_lines_of_earlier_releases_are_shown(tmp_path: Path) -> None:
    with make_run(tmp_path).directory as directory:
        directory.store("epoch-0000")
    shutil.copy(EARLIER, tmp_path / "run" / "trajectories" / "epoch-0000.jsonl")
    listed = CliRunner().invoke(trajectories, ["list", str(tmp_path / "run")], catch_exceptions=False).output
    assert "run.e0.0.0.ab10" in listed
    command = ["show", str(tmp_path / "run"), "e0.0.0", "--tokens"]
    shown = CliRunner().invoke(trajectories, command, catch_exceptions=False).output
    assert "0.75 (right 1), and 1.25 for single calls" in shown
    assert '         2        5   -6.0000   0.2%  "?"' in shown


def test_tokens_are_set_aside_with_their_lines(tmp_path: Path) -> None:
    with make_run(tmp_path).directory as directory:
        for number in (1, 2):
            directory.store("epoch-0000").append(rollout(call(number, 3, 2)))
            aside = directory.set_aside("epoch-0000")
            assert aside.name == f"epoch-0000-failed-{number}.jsonl"
            assert read_rollouts(aside)[0].read_calls() == [call(number, 3, 2)]
        assert sorted(each.name for each in aside.parent.iterdir()) == [
            *("epoch-0000-failed-1.jsonl", "epoch-0000-failed-1.tokens"),
            *("epoch-0000-failed-2.jsonl", "epoch-0000-failed-2.tokens"),
        ]
