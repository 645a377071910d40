"""A group scored again: the trainer's advantages, the reward as it is on disk, and nobody else's page."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
import yaml
from starlette.testclient import TestClient

from insitu.errors import DeadlineExceeded, InvalidRequest, NotFound, Overloaded
from insitu.view.answers import rescoring
from insitu.view.answers.groups import group_view
from insitu.view.answers.rescoring import Rescoring
from insitu.view.catalogue import Catalogue
from insitu.view.http.app import build_app
from insitu.view.run import ViewedRun
from insitu.wire.message import read
from insitu.wire.views.groups import RescoredGroup
from insitu.wire.views.runs import RunView

PORT = 7777
OWN_PAGE = f"http://127.0.0.1:{PORT}"
STORE = "epoch-0000-step-0000"


def opened(path: Path, tmp_path: Path) -> ViewedRun:
    run = ViewedRun("run", path, index=tmp_path / "rescored.db")
    while not run.index.refresh():
        pass
    return run


@pytest.fixture
def other_rewards(run_copy: Path, tmp_path: Path) -> Iterator[ViewedRun]:
    """The run, as if another reward had scored its rollouts: none has the reward that the trainer saw."""
    for file in (run_copy / "trajectories").glob("epoch-*.jsonl"):
        lines = [orjson.loads(line) for line in file.read_bytes().splitlines()]
        for line in lines:
            if line["reward"] is not None:
                line["reward"] = 10.0 + line["generation"]
        file.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    for file in (run_copy / "left_out").glob("*.json"):
        kept = {key: why for key, why in orjson.loads(file.read_bytes()).items() if why == "failed"}
        file.write_bytes(orjson.dumps(kept))
    run = opened(run_copy, tmp_path)
    yield run
    run.close()


@pytest.fixture
def own_reward(run_copy: Path, tmp_path: Path) -> Iterator[ViewedRun]:
    """The run with a reward in a file beside its directory, and its dataset."""
    config = orjson.loads((run_copy / "config.json").read_bytes())
    (name,) = config["config"]["eval"]["evaluators"]
    config["config"]["eval"]["evaluators"][name]["entry"] = "edited_reward:score"
    rows = [{"id": f"row-{i}", "question": f"question {i}", "answer": str(i)} for i in range(6)]
    (run_copy.parent / "train.json").write_bytes(orjson.dumps(rows))
    config["config"]["eval"]["general"]["dataset"]["file_path"] = str(run_copy.parent / "train.json")
    (run_copy / "config.json").write_bytes(orjson.dumps(config))
    run = opened(run_copy, tmp_path)
    yield run
    run.close()


def own_config(run: ViewedRun) -> Path:
    """Write the run's configuration as the user's own file, outside the run directory."""
    file = run.path.parent / "config.yml"
    file.write_text(yaml.safe_dump(run.files.config))
    return file


def scorer_of(run: ViewedRun) -> Rescoring:
    return Rescoring(own_config(run))


def write_reward(run: ViewedRun, *lines: str) -> Path:
    file = run.path.parent / "edited_reward.py"
    file.write_text("\n".join(["def score(item):", *(f"    {line}" for line in lines), ""]))
    return file


def on_disk(folder: Path) -> dict[str, tuple[int, str]]:
    """Every file with its time of change and its content."""
    return {
        str(file): (file.stat().st_mtime_ns, hashlib.sha256(file.read_bytes()).hexdigest())
        for file in sorted(folder.rglob("*"))
        if file.is_file() and not file.name.startswith(".")
    }


def test_the_new_advantages_are_those_that_the_trainer_computed_for_these_rewards(other_rewards):
    """The trainer's account of the step is of the reward `exactness`, which scores the rollouts again."""
    line = orjson.loads((other_rewards.path / "steps.jsonl").read_bytes().splitlines()[0])
    scorer = scorer_of(other_rewards)
    before = on_disk(other_rewards.path)
    rows = other_rewards.index.read(
        lambda db: db.execute(
            "SELECT DISTINCT r.position FROM rollouts r JOIN stores s ON s.id = r.store WHERE s.name = ?",
            (STORE,),
        ).fetchall()
    )
    groups = [scorer.group(other_rewards, STORE, index) for (index,) in rows]
    assert len(groups) == 3
    siblings = [sibling for group in groups for sibling in group.siblings]
    assert all(each.reward is None or each.reward >= 10 for each in siblings), "the fixture changed them"
    taught = [each.new_advantage for each in siblings if each.fate == "trained"]
    trained = [each for each in taught if each is not None]
    assert len(trained) == len(taught)
    dropped = Counter(each.reason for each in siblings if each.fate == "dropped")
    assert dict(dropped) == line["account"]["dropped"]
    own = line["training"]
    assert len(trained) == line["account"]["trained"] > 2
    assert math.isclose(statistics.fmean(trained), own["advantage/mean"], abs_tol=1e-12)
    assert math.isclose(statistics.pstdev(trained), own["advantage/std"], abs_tol=1e-12)
    assert (min(trained), max(trained)) == (own["advantage/min"], own["advantage/max"])
    assert any(each.advantage != each.new_advantage for each in siblings)
    rewarded = [each.new_reward for each in siblings if each.new_reward is not None]
    assert math.isclose(statistics.fmean(rewarded), line["avg_reward"], abs_tol=1e-12)
    assert on_disk(other_rewards.path) == before


def test_the_file_is_read_each_time_and_nothing_is_written(own_reward):
    tree = group_view(own_reward, STORE, *_first_index(own_reward), 64).tree
    write_reward(own_reward, "print('not the answer')", "return float(item.row['answer']) + len(item.calls)")
    scorer = scorer_of(own_reward)
    before = on_disk(own_reward.path.parent)
    first = scorer.group(own_reward, STORE, *_first_index(own_reward))
    assert on_disk(own_reward.path.parent) == before
    assert first.note == ""
    index = _first_index(own_reward)[0]
    assert [each.rollout_id for each in first.siblings] == [each.rollout_id for each in tree.siblings]
    assert {each.new_reward for each in first.siblings} == {index + (1.0 if index % 2 else 2.0)}
    assert {each.reason for each in first.siblings} == {"zero_variance"}
    assert {each.new_advantage for each in first.siblings} == {0.0}
    write_reward(own_reward, "return {'': 0}[item.output]")
    second = scorer.group(own_reward, STORE, index)
    for sibling in second.siblings:
        assert sibling.new_reward is None
        assert sibling.reason == "failed"
        assert (sibling.error or "").startswith("KeyError")
        assert sibling.frames[-1].endswith("edited_reward.py:2 in score: return {'': 0}[item.output]")


def test_nothing_that_a_run_directory_names_is_executed(own_reward, monkeypatch):
    """Its reward may be a command, or a function of a file beside it: whoever made the directory chose it."""
    ran = own_reward.path.parent / "ran"
    write_reward(own_reward, "return 1.0").write_text(f"open({str(ran)!r}, 'w').close()\n")
    monkeypatch.setattr(rescoring, "rescore", lambda _: pytest.fail("a process was started"))
    with pytest.raises(InvalidRequest, match="is not executed") as raised:
        Rescoring(None).group(own_reward, STORE, *_first_index(own_reward))
    assert raised.value.hint == "start insitu view with your own configuration: insitu view config.yml"
    assert not ran.exists()


def test_a_configuration_file_that_the_user_names_is_read_each_time(own_reward, tmp_path):
    config = orjson.loads(orjson.dumps(own_reward.files.config))
    (name,) = config["eval"]["evaluators"]
    config["eval"]["evaluators"][name]["entry"] = "named_reward:score"
    file = tmp_path / "project" / "config.yml"
    file.parent.mkdir()
    file.write_text(yaml.safe_dump(config))
    (file.parent / "named_reward.py").write_text("def score(item):\n    return 0.25\n")
    scorer = Rescoring(file)
    found = scorer.group(own_reward, STORE, *_first_index(own_reward))
    assert {each.new_reward for each in found.siblings} == {0.25}
    file.write_text("eval: {}")
    with pytest.raises(InvalidRequest, match="reward_function"):
        scorer.group(own_reward, STORE, *_first_index(own_reward))


def _first_index(run: ViewedRun) -> tuple[int]:
    (found,) = run.index.read(
        lambda db: db.execute(
            "SELECT min(r.position) FROM rollouts r JOIN stores s ON s.id = r.store WHERE s.name = ?",
            (STORE,),
        ).fetchone()
    )
    return (found,)


def test_a_reward_that_never_ends_is_ended(own_reward, monkeypatch):
    write_reward(own_reward, "import time", "time.sleep(600)")
    monkeypatch.setattr(rescoring, "_SECONDS", 2.0)
    with pytest.raises(DeadlineExceeded, match="within 2 s"):
        scorer_of(own_reward).group(own_reward, STORE, *_first_index(own_reward))


def test_a_module_that_cannot_be_imported_is_told_with_its_line(own_reward):
    file = write_reward(own_reward, "return 1.0")
    file.write_text("import insitu\n1 / 0\n")
    with pytest.raises(InvalidRequest, match=r"edited_reward.py:2 in <module>: 1 / 0"):
        scorer_of(own_reward).group(own_reward, STORE, *_first_index(own_reward))


def test_only_groups_of_a_training_step_are_scored_again(own_reward):
    with pytest.raises(InvalidRequest, match="not a training step"):
        scorer_of(own_reward).group(own_reward, "validation-0000", 0)
    with pytest.raises(NotFound):
        scorer_of(own_reward).group(own_reward, STORE, 99)


def test_one_group_is_scored_at_a_time(own_reward, monkeypatch):
    scorer = scorer_of(own_reward)

    def meanwhile(*_):
        with pytest.raises(Overloaded):
            scorer.group(own_reward, STORE, *_first_index(own_reward))
        raise InvalidRequest("it was tried")

    monkeypatch.setattr(rescoring, "rescore", meanwhile)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="it was tried"):
            scorer.group(own_reward, STORE, *_first_index(own_reward))


@pytest.fixture
def client(own_reward: ViewedRun, tmp_path: Path) -> Iterator[TestClient]:
    app = build_app(Catalogue(own_reward.path), PORT, pages=tmp_path)
    with TestClient(app, base_url=OWN_PAGE) as found:
        yield found


def test_only_the_servers_own_page_can_ask(client, own_reward, monkeypatch):
    asked: list[tuple[str, int]] = []

    def group(_: Rescoring, __: ViewedRun, store: str, index: int) -> RescoredGroup:
        asked.append((store, index))
        return RescoredGroup(store, index, "reward", [], "trainer_function", "")

    monkeypatch.setattr(Rescoring, "group", group)
    run = f"/view/v1/runs/{client.get('/view/v1/runs').json()['runs'][0]['key']}"
    secret = read(RunView, client.get(run).content).rescoring
    assert secret is not None
    assert len(secret) > 40
    address = f"{run}/groups/{STORE}/0/rescore"
    own = {"origin": OWN_PAGE, "x-insitu-own-page": secret}
    foreign: list[dict[str, str]] = [
        {},
        {"origin": OWN_PAGE},
        {"x-insitu-own-page": secret},
        own | {"x-insitu-own-page": secret[:-1]},
        own | {"x-insitu-own-page": "é"},
        own | {"origin": "null"},
        own | {"origin": "https://evil.example"},
        own | {"origin": f"http://127.0.0.1:{PORT + 1}"},
        own | {"origin": f"http://localhost:{PORT}"},
        own | {"host": f"evil.example:{PORT}", "origin": f"http://evil.example:{PORT}"},
        own | {"sec-fetch-site": "cross-site"},
    ]
    for headers in foreign:
        raw = {name: value.encode() for name, value in headers.items()}
        assert client.post(address, headers=raw).status_code == 403, headers
    for other in (run, f"{run}/groups/{STORE}/0", f"{address}/more"):
        assert client.post(other, headers=own).status_code == 405
    assert asked == []
    assert read(RescoredGroup, client.post(address, headers=own).content).index == 0
    assert asked == [(STORE, 0)]
    assert client.get(address).status_code == 404
