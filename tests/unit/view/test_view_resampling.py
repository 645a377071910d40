"""Going on from a fork: the exact ids, the chosen weights, the reward on disk, and errors in plain words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from insitu.access.key_changes import create_key
from insitu.access.scopes import Scope
from insitu.backend.ledger import Ledger
from insitu.errors import (
    ChildFailed,
    DeadlineExceeded,
    Forbidden,
    InsituError,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unauthorized,
    Unavailable,
    UpstreamError,
)
from insitu.harness.trial import resampling as harness
from insitu.harness.trial.resampling import NextToken, ResampleAnswer, ResampleRequest
from insitu.types import LeaseState
from insitu.view.answers import resampling
from insitu.view.answers.groups import group_view
from insitu.view.answers.resampling import BesideAgent, Fork
from insitu.view.catalogue import Catalogue
from insitu.view.http.app import build_app
from insitu.view.run import ViewedRun
from insitu.wire.message import read
from insitu.wire.views.groups import ResampledFork
from insitu.wire.views.runs import RunView
from tests.support.finetune_bench import FinetuneBench
from tests.support.standin_engine import StandinEngine
from tests.support.viewed_run import exactness, running, write_tokenizer

PORT = 7778
OWN_PAGE = f"http://127.0.0.1:{PORT}"
STORE = "epoch-0000-step-0000"


@dataclass(frozen=True)
class Bench:
    """A finished run, its backend and its configuration."""

    made: FinetuneBench
    run: ViewedRun
    file: Path

    def fork(self, step: int | None, fork: Fork | None = None, **options: Any) -> ResampledFork:
        found = BesideAgent.of(self.file).resampling
        asked = {"count": 3, "max_tokens": 8, **options}
        return found.fork(self.run, STORE, 1, fork or self.first(), step, **asked)

    def first(self) -> Fork:
        """Where the siblings of an example with one turn part."""
        tree = group_view(self.run, STORE, 1, 64).tree
        assert len(tree.nodes[0].children) > 1
        branch = tree.branches[tree.nodes[0].branches[0]]
        rollout_id = tree.siblings[branch.sibling].rollout_id
        return Fork(rollout_id, branch.sequence, len(tree.nodes[0].ids))

    def request(self, **changes: Any) -> ResampleRequest:
        tree = group_view(self.run, STORE, 1, 64).tree
        fields = {
            "config_file": str(self.file),
            "run": "small",
            "step": None,
            "prompt_ids": tree.nodes[0].ids,
            "sampling": {"temperature": 1.0},
            "count": 2,
            "max_tokens": 8,
            "seconds": 30.0,
        }
        return ResampleRequest.model_validate(fields | changes)


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))  # the reward is one of `tests`
    async with running(tmp_path, monkeypatch, num_epochs=2, num_examples=3) as made:
        folder = write_tokenizer(tmp_path / "tokenizer")
        run = ViewedRun("run", made.project.output, tokenizer=folder, index=tmp_path / "resampled.db")
        while not run.index.refresh():
            pass
        made.backend.engine._keep_seen = True
        yield Bench(made, run, made.project.path / "config.yml")
        run.close()


def sampled(bench: Bench) -> list[dict[str, Any]]:
    return bench.made.backend.engine.calls_to("/inference/v1/generate")


async def test_a_fork_goes_on_from_its_exact_ids_and_is_scored(bench):
    before = sorted(bench.run.path.rglob("*"))
    tree = group_view(bench.run, STORE, 1, 64).tree
    branch = max(tree.branches, key=lambda each: each.num_tokens)
    fork = Fork(tree.siblings[branch.sibling].rollout_id, 0, tree.num_prompt_tokens + 1)
    found = await asyncio.to_thread(bench.fork, 1, fork)
    assert found.score_gap is None, "the record is of the base model, not of step 1"
    assert found.note.startswith("The next tokens were not scored again")
    path = [node for node in tree.nodes if tree.branches.index(branch) in node.branches]
    ids = [token for node in path for token in node.ids][: fork.depth]
    written = [text for node in path for text in node.texts or []][tree.num_prompt_tokens : fork.depth]
    continued = sampled(bench)
    assert [call["token_ids"] for call in continued] == [ids] * 3
    assert {call["model"] for call in continued} == {found.model} == {"small@1"}
    assert {call["sampling_params"]["max_tokens"] for call in continued} == {8}
    assert (found.rollout_id, found.sequence, found.depth) == (fork.rollout_id, 0, fork.depth)
    assert found.step == 1
    assert len(found.branches) == 3
    assert found.reward_note == ""
    for each in found.branches:
        assert "".join(each.texts or []) == each.text
        assert len(each.ids) == len(each.logprobs) <= 8
        whole = "".join(written) + each.text
        assert each.reward == exactness(SimpleNamespace(rollout_id=fork.rollout_id, output=whole))
        assert each.error is None
    assert sorted(bench.run.path.rglob("*")) == before
    leases = await asyncio.to_thread(bench.made.backend.ledger.open_leases)
    assert [lease for lease in leases if lease.state is not LeaseState.ENDED] == []


async def test_the_next_tokens_are_scored_again_by_the_same_weights(bench):
    found = await asyncio.to_thread(bench.fork, None)
    again = sampled(bench)[-1]
    tree = group_view(bench.run, STORE, 1, 64).tree
    nexts = {tree.nodes[child].ids[0] for child in tree.nodes[0].children}
    assert again["token_ids"] == tree.nodes[0].ids
    assert set(again["sampling_params"]["allowed_token_ids"]) == nexts
    assert found.version == "base"
    assert found.score_gap == pytest.approx(0.0, abs=1e-6)
    assert found.note == ""
    # An engine that computes something else after these ids is seen.
    other = [NextToken(id=each, logprob=-0.5 - place, version="base") for place, each in enumerate(nexts)]
    seen = await harness.sample(bench.request(next_tokens=other))
    assert seen.score_gap is not None
    assert seen.score_gap > 0.1
    loaded_again = [each.model_copy(update={"version": "base#2"}) for each in other]
    assert (await harness.sample(bench.request(next_tokens=loaded_again))).score_gap is not None
    foreign = [each.model_copy(update={"version": "small@1"}) for each in other]
    assert (await harness.sample(bench.request(next_tokens=foreign))).score_gap is None
    assert (await harness.sample(bench.request(next_tokens=other[:1]))).score_gap is None


async def test_a_gateway_that_goes_on_from_other_ids_is_not_believed(bench, monkeypatch):
    rendered = StandinEngine._rendered

    def shorter(self: Any, body: dict[str, Any], token_ids: list[int]) -> dict[str, Any]:
        return rendered(self, body, token_ids[:-1])

    monkeypatch.setattr(StandinEngine, "_rendered", shorter)
    with pytest.raises(UpstreamError, match="did not go on from"):
        await harness.sample(bench.request())


async def test_errors_say_what_to_do(bench):
    with pytest.raises(NotFound, match="step 7 of run 'small' is not kept; kept are 0, 1, 2"):
        await harness.sample(bench.request(step=7))
    with pytest.raises(InvalidRequest, match="trains the run 'small', but these rollouts are of 'other'"):
        await harness.sample(bench.request(run="other"))
    bench.made.backend.engine.behaviour.fault = "hang"
    with pytest.raises(DeadlineExceeded, match="within 3 s: still sampling 2 answers of at most 8 tokens"):
        await harness.sample(bench.request(seconds=8.0))
    bench.made.backend.engine.behaviour.fault = None
    project = bench.made.project
    project.configure(trainer_adapters={"backend": {"backend": {"api_key": "wrong"}}})
    with pytest.raises(Unauthorized, match="rejects the key"):
        await harness.sample(bench.request())
    project.configure(llms={"policy": {"base_url": "http://127.0.0.1:9/v1"}})
    with pytest.raises(Unavailable, match=r"no gateway answers at http://127\.0\.0\.1:9"):
        await harness.sample(bench.request())
    project.configure(trainer_adapters={"backend": {"backend": {"port": 9}}})
    with pytest.raises(Unavailable, match=r"no insitu backend answers at http://127\.0\.0\.1:9"):
        await asyncio.to_thread(harness.resample, bench.request())
    with pytest.raises(InvalidRequest, match="keeps no secrets") as raised:
        BesideAgent.of(None).resampling.fork(bench.run, STORE, 1, bench.first(), None, 1, 8)
    assert "insitu view config.yml" in raised.value.hint


async def test_a_step_that_is_not_lent_is_told_with_the_reason(bench, monkeypatch):
    project, backend = bench.made.project, bench.made.backend
    monkeypatch.setattr(Ledger, "make_lease_ready", lambda _self, lease: lease)
    with pytest.raises(DeadlineExceeded, match="still waiting until the backend serves step 1"):
        await harness.sample(bench.request(step=1, seconds=8.0))
    monkeypatch.setattr(Ledger, "make_lease_ready", lambda self, _lease: self.end_leases("no room for it"))
    with pytest.raises(ChildFailed, match="the lease of small@1 has ended: no room for it"):
        await harness.sample(bench.request(step=1))
    key, _ = create_key(backend.state_dir, "caller", [Scope.INFER])
    project.configure(trainer_adapters={"backend": {"backend": {"api_key": key}}})
    with pytest.raises(Forbidden, match=r"does not suffice: .*scope `submit`"):
        await harness.sample(bench.request(step=1))
    assert sampled(bench) == []


async def test_only_places_of_the_record_are_continued(bench):
    first = bench.first()
    for wrong, kind in (
        (replace(first, rollout_id="nobody"), NotFound),
        (replace(first, sequence=5), NotFound),
        (replace(first, depth=10_000), NotFound),
        (replace(first, depth=3), InvalidRequest),  # within the prompt, which nobody sampled
    ):
        with pytest.raises(kind):
            bench.fork(None, wrong)
    assert sampled(bench) == []


async def test_an_answer_that_is_not_the_output_is_not_scored(bench, monkeypatch):
    """The first of two turns: nobody knows what the agent would do next."""
    tree = group_view(bench.run, STORE, 0, 64).tree
    branch = tree.branches[tree.nodes[0].branches[0]]
    fork = Fork(tree.siblings[branch.sibling].rollout_id, 0, tree.num_prompt_tokens)
    answer = ResampleAnswer(model="tiny", version="base")
    monkeypatch.setattr(resampling, "resample", lambda _request: answer)
    found = BesideAgent.of(bench.file).resampling.fork(bench.run, STORE, 0, fork, None, 1, 8)
    assert found.reward_note.startswith("Not scored: the agent makes something else of this answer")


async def test_one_fork_at_a_time_within_bounds_and_only_by_the_own_page(bench, tmp_path, monkeypatch):
    beside = BesideAgent.of(bench.file)
    asked: list[ResampleRequest] = []

    def meanwhile(request: ResampleRequest) -> ResampleAnswer:
        with pytest.raises(Overloaded):
            beside.resampling.fork(bench.run, STORE, 1, bench.first(), None, 1, 8)
        raise InsituError("it was tried")

    monkeypatch.setattr(resampling, "resample", meanwhile)
    for _ in range(2):
        with pytest.raises(InsituError, match="it was tried"):
            beside.resampling.fork(bench.run, STORE, 1, bench.first(), None, 1, 8)

    def noted(request: ResampleRequest) -> ResampleAnswer:
        asked.append(request)
        return ResampleAnswer(model="small@1", version="small@1")

    monkeypatch.setattr(resampling, "resample", noted)
    app = build_app(Catalogue(bench.run.path), PORT, pages=tmp_path, config_file=bench.file)
    with TestClient(app, base_url=OWN_PAGE) as client:
        run = f"/view/v1/runs/{client.get('/view/v1/runs').json()['runs'][0]['key']}"
        view = read(RunView, client.get(run).content)
        assert view.configured
        fork = bench.first()
        given = {"rollout": fork.rollout_id, "sequence": 0, "depth": fork.depth, "step": 1}
        own = {"origin": OWN_PAGE, "x-insitu-own-page": view.rescoring or ""}
        address = f"{run}/groups/{STORE}/1/resample"
        assert client.post(address, params=given, headers={"origin": OWN_PAGE}).status_code == 403
        for wrong in ({"count": 9}, {"count": 0}, {"max_tokens": 4097}, {"step": -1}, {"depth": 0}):
            assert client.post(address, params=given | wrong, headers=own).status_code == 400, wrong
        assert asked == []
        assert read(ResampledFork, client.post(address, params=given, headers=own).content).step == 1
        assert (asked[0].step, asked[0].count, asked[0].max_tokens) == (1, 4, 256)
    app = build_app(Catalogue(bench.run.path), PORT, pages=tmp_path)
    with TestClient(app, base_url=OWN_PAGE) as client:
        assert not read(RunView, client.get(run).content).configured
