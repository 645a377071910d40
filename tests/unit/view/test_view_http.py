"""The server: every route answers in the messages of the wire, and nobody else's page reaches it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from starlette.testclient import TestClient

from insitu.view.catalogue import Catalogue
from insitu.view.http.app import build_app
from insitu.wire.message import read
from insitu.wire.views.compare import CompareView
from insitu.wire.views.groups import GroupPage, GroupView, TreeView
from insitu.wire.views.rollouts import RolloutPage, RolloutView
from insitu.wire.views.runs import AlarmList, ConfigView, RunListView, RunView
from tests.support.viewed_run import write_tokenizer

PORT = 7777


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    folder = tmp_path / "pages"
    (folder / "assets").mkdir(parents=True)
    (folder / "index.html").write_text("<!doctype html><title>insitu</title>")
    (folder / "assets" / "app-1.js").write_text("export {}")
    (tmp_path / "secret.txt").write_text("not a page")
    return folder


@pytest.fixture
def client(run_copy: Path, tmp_path: Path, pages: Path) -> Iterator[TestClient]:
    catalogue = Catalogue(run_copy, tokenizer=write_tokenizer(tmp_path / "tokenizer"))
    app = build_app(catalogue, PORT, pages=pages)
    with TestClient(app, base_url=f"http://127.0.0.1:{PORT}") as opened:
        yield opened


@pytest.fixture
def run(client: TestClient) -> str:
    return f"/view/v1/runs/{client.get('/view/v1/runs').json()['runs'][0]['key']}"


def whole(kind: type[Any], client: TestClient, address: str) -> Any:
    """An answer, read back as the message that it claims to be."""
    answer = client.get(address)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    return read(kind, answer.content)


def test_every_route(client, run, run_copy):
    listed = whole(RunListView, client, "/view/v1/runs")
    assert [each.path for each in listed.runs] == [str(run_copy)]
    view = whole(RunView, client, run)
    assert view.run.num_rollouts == 90
    assert view.run.state == "ended"
    assert view.texts.available
    assert whole(ConfigView, client, f"{run}/config").config["finetuning"]["num_epochs"] == 3
    assert whole(AlarmList, client, f"{run}/alarms").failures == []
    page = whole(RolloutPage, client, f"{run}/rollouts?kind=training&fate=trained&sort=best&limit=2")
    first, second = page.rollouts
    assert whole(RolloutView, client, f"{run}/rollouts/{first.rollout_id}").calls[0].output is not None
    light = whole(RolloutView, client, f"{run}/rollouts/{first.rollout_id}?tokens=false")
    assert light.calls[0].output is None
    group = whole(GroupPage, client, f"{run}/groups?kind=training&sort=spread&limit=1").groups[0]
    assert whole(GroupView, client, f"{run}/groups/{group.store}/{group.index}").index == group.index
    tree = whole(TreeView, client, f"{run}/tree?rollout={first.rollout_id}&rollout={second.rollout_id}")
    assert len(tree.siblings) == 2
    compared = whole(CompareView, client, f"{run}/compare?before=validation-0000&after=validation-0003")
    assert compared.total == 6


def test_the_overview_adds_up(client, run, run_copy):
    view = whole(RunView, client, run)
    lines = [orjson.loads(line) for line in (run_copy / "steps.jsonl").read_bytes().splitlines()]
    assert [point.position for point in view.points] == list(range(6))
    for point, line in zip(view.points, lines, strict=True):
        assert sum(point.fates.values()) == point.num_rollouts == 12
        assert point.reward is not None
        assert point.reward.mean == pytest.approx(line["avg_reward"])
        assert point.reward.std == pytest.approx(line["reward_std"])
        assert (point.reward.min, point.reward.max) == (line["min_reward"], line["max_reward"])
        assert point.calls["seen"] == sum(point.calls.values()) - point.calls["seen"]
        assert set(point.seconds) == {"rollouts", "train", "publish", "probe"}
        assert point.verdict is not None
        assert point.verdict.sentence == line["verdict"]["sentence"]
    assert view.reasons[0] == "trained"
    assert set(view.reasons) == {name for point in view.points for name in point.fates}
    history = orjson.loads((run_copy / "validation_history.json").read_bytes())
    assert [each.reward for each in view.validations] == [each["avg_reward"] for each in history]
    for each in view.validations:
        assert each.reward is not None
        assert each.low is not None
        assert each.high is not None
        assert each.low <= each.reward <= each.high
        assert each.store is not None
    assert [each.step for each in view.validations][:2] == [0, 6]
    assert [point.number for point in view.points] == [line["step"] for line in lines]
    labels = {store.name: store.label for store in view.stores}
    assert labels["epoch-0000-step-0001"] == "step 2"
    assert labels["validation-0000"] == "validation before training"
    assert labels["validation-0003"] == "validation after step 6"


BAD = [
    ("", 404),
    ("/nothing", 404),
    ("/rollouts?limit=0", 400),
    ("/rollouts?limit=201", 400),
    ("/rollouts?limit=ten", 400),
    ("/rollouts?min_reward=nan", 400),
    ("/rollouts?min_reward=inf", 400),
    ("/rollouts?epoch=-1", 400),
    ("/rollouts?epoch=99999999999999999999", 400),
    ("/rollouts?sort=random", 400),
    ("/rollouts?kind=other", 400),
    ("/rollouts?fate=lost", 400),
    ("/rollouts?cursor=%00", 400),
    (f"/rollouts?text={'x' * 301}", 400),
    ("/rollouts/no-such-rollout", 404),
    ("/groups/epoch-0000-step-0000/99", 404),
    ("/groups/epoch-0000-step-0000/x", 400),
    ("/groups/epoch-0000-step-0000/99999999999999999999", 400),
    ("/groups/..%2F..%2Fconfig/0", 404),
    ("/tree", 400),
    ("/tree?rollout=no-such-rollout", 404),
    ("/compare?before=validation-0000", 400),
    ("/compare?before=validation-0000&after=nothing", 404),
    ("/compare?before=validation-0000&after=validation-0003&other=nobody", 404),
    ("/events?after=yesterday", 400),
]


@pytest.mark.parametrize(("address", "status"), BAD)
def test_bad_requests_are_told_why(client, run, address, status):
    answer = client.get(f"{run}{address}" if address else "/view/v1/runs/nobody")
    assert answer.status_code == status, answer.text
    assert set(answer.json()["error"]) == {"type", "message", "hint"}
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7777", "127.0.0.1", "127.0.0.1:7778", ""])
def test_other_hosts_are_rejected(client, host):
    """A name that is pointed at this machine is still another name."""
    for address in ("/view/v1/runs", "/"):
        assert client.get(address, headers={"host": host}).status_code == 403


@pytest.mark.parametrize("host", ["127.0.0.1:7777", "localhost:7777", "LOCALHOST:7777", "[::1]:7777"])
def test_own_hosts_are_answered(client, host):
    assert client.get("/view/v1/runs", headers={"host": host}).status_code == 200


def test_pages_of_other_sites_get_nothing(client):
    foreign = {"sec-fetch-site": "cross-site", "origin": "https://evil.example"}
    assert client.get("/view/v1/runs", headers=foreign).status_code == 403
    answer = client.get("/view/v1/runs", headers={"origin": "https://evil.example"})
    assert not [name for name in answer.headers if name.startswith("access-control-")]
    assert client.get("/", headers=foreign).status_code == 200, "a link to the page may be followed"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(client, method):
    assert client.request(method, "/view/v1/runs").status_code == 405


@pytest.mark.parametrize(
    "address", ["/", "/view/v1/runs", "/view/v1/runs/nobody", "/assets/app-1.js", "/x.js"]
)
def test_headers_of_every_answer(client, address):
    headers = client.get(address).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'")
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


def test_pages_and_their_files(client):
    assert "insitu" in client.get("/").text
    assert client.get("/runs/some/rollouts").text == client.get("/").text, "the application routes this"
    script = client.get("/assets/app-1.js")
    assert script.headers["content-type"].startswith("text/javascript")
    assert "immutable" in script.headers["cache-control"]
    assert client.get("/assets/none.js").status_code == 404
    for address in ("/..%2Fsecret.txt", "/assets/..%2F..%2Fsecret.txt", "/%2e%2e/secret.txt"):
        assert "not a page" not in client.get(address).text
    assert client.get("/view/v2/runs").status_code == 404


@pytest.mark.parametrize(
    "path", ["/%00", "/a%00.js", f"/{'x' * 5000}", f"/{'x' * 300}.js", "/..%2Fsecret.txt"]
)
def test_addresses_that_no_file_can_have(client, path):
    assert client.get(path).status_code in (200, 404)
    assert "not a page" not in client.get(path).text


def test_an_installation_without_pages_says_so(run_copy, tmp_path):
    app = build_app(Catalogue(run_copy), PORT, pages=tmp_path / "nowhere")
    with TestClient(app, base_url=f"http://127.0.0.1:{PORT}") as client:
        answer = client.get("/")
        assert answer.status_code == 503
        assert "has no index.html" in answer.text
        assert client.get("/view/v1/runs").status_code == 200


def test_a_directory_of_several_runs(run_copy, tmp_path):
    import shutil

    shutil.copytree(run_copy, run_copy.parent / "project" / "output")
    (run_copy.parent / "not-a-run").mkdir()
    broken = run_copy.parent / "broken"
    (broken / "trajectories").mkdir(parents=True)
    (broken / "config.json").write_text("[]")
    app = build_app(Catalogue(run_copy.parent), PORT, pages=tmp_path)
    with TestClient(app, base_url=f"http://127.0.0.1:{PORT}") as client:
        listed = whole(RunListView, client, "/view/v1/runs")
        first, second = (each.key for each in listed.runs)
        assert second == f"{first}.2" or first == f"{second}.2", "a copy has a name of its own"
        assert listed.problems == [f"{broken / 'config.json'} is not the configuration of a run of insitu"]
        address = f"/view/v1/runs/{first}/compare?before=validation-0000&after=validation-0003&other={second}"
        assert whole(CompareView, client, address).after.run == second


def test_hostile_texts_come_back_as_they_are(client, run):
    page = whole(RolloutPage, client, f"{run}/rollouts?text=%3Cscript&limit=1")
    assert "<script" in page.rollouts[0].answer
    failed = whole(RolloutPage, client, f"{run}/rollouts?ending=tool_error&limit=1")
    assert failed.rollouts[0].failure == "ValueError: the calculator is not plugged in: <b>&amp;</b>"


def test_texts_that_are_hardly_text(client, run, run_copy):
    """Half a character and a number beyond 64 bits are JSON, and an agent may return both."""
    file = run_copy / "trajectories" / "epoch-0000-step-0000.jsonl"
    line = orjson.loads(file.read_bytes().splitlines()[1])
    line |= {"rollout_id": "odd", "input": {"question": "half \ud83d of it"}, "output": ["\ud800", 10**30]}
    with file.open("ab") as out:
        out.write(json.dumps(line | {"tokens": None, "calls": []}).encode() + b"\n")
    deadline = time.monotonic() + 30
    while client.get(f"{run}/rollouts/odd").status_code == 404:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert client.get(f"{run}/rollouts/odd").json()["output"] == ["\ud800", 10**30]
    page = whole(RolloutPage, client, f"{run}/rollouts?text=half")
    assert [(row.rollout_id, row.question) for row in page.rollouts] == [("odd", "half ? of it")]
    assert whole(RunView, client, run).run.problems == []
