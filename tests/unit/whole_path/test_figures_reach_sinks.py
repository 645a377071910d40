"""Sinks get the figures of a run as its files have them, and can neither slow nor end it.

The sinks here are stand-ins that record, raise or hang; `make sinks` runs the real libraries.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from insitu.errors import InvalidRequest
from insitu.harness.dry_run import dry_run
from insitu.harness.rollouts.rollout import Rollout
from insitu.harness.sinks import feed, sinks
from insitu.harness.sinks.otlp import trace_id
from insitu.harness.sinks.sink import Figures, RunStart, SentRollout, Sink
from insitu.plugins import ComponentConfig, Kind, register
from insitu.types import Ending
from tests.support.finetune_bench import FinetuneBench, agent, by_generation, one_call, open_bench, rewards
from tests.support.own_figures import Series, own_figures
from tests.support.recording_server import RecordingServer

STARTS: list[RunStart] = []
GOT: list[Figures] = []
ROLLOUTS: list[SentRollout] = []
ENDS: list[str] = []
HELD = threading.Event()


class RecordingStandin(Sink):
    takes_rollouts = True

    def __init__(self, config: ComponentConfig, parts: object) -> None:
        pass

    def start(self, run: RunStart) -> str:
        STARTS.append(run)
        return run.known_as or f"standin-{len(STARTS)}"

    def figures(self, figures: Figures) -> None:
        GOT.append(figures)

    def rollouts(self, rollouts: Sequence[SentRollout]) -> None:
        ROLLOUTS.extend(rollouts)

    def end(self, outcome: str) -> None:
        ENDS.append(outcome)


class RaisingStandin(RecordingStandin):
    def figures(self, figures: Figures) -> None:
        if figures.number != 1:
            raise ConnectionError("the product is away")
        super().figures(figures)


class UnopenedStandin(RecordingStandin):
    def start(self, run: RunStart) -> str:
        raise SystemExit("no key")


class HangingStandin(RecordingStandin):
    def figures(self, figures: Figures) -> None:
        HELD.wait(60)


@pytest.fixture(autouse=True)
def standins() -> Iterator[None]:
    for name, made in {
        "standin_recording": RecordingStandin,
        "standin_raising": RaisingStandin,
        "standin_unopened": UnopenedStandin,
        "standin_hanging": HangingStandin,
    }.items():
        register(Kind.SINK, name)(made)
    for kept in (STARTS, GOT, ROLLOUTS, ENDS):
        kept.clear()
    HELD.clear()
    yield
    HELD.set()


def configure(bench: FinetuneBench, *listed: Any, **finetuning: Any) -> None:
    bench.project.configure(
        workflow=agent(one_call),
        eval=rewards(by_generation),
        trajectory_builders={"groups": {"num_generations": 2}},
        finetuning={"num_epochs": 2, "groups_per_step": 2, **finetuning},
        sinks=list(listed),
    )


def series(figures: Sequence[Figures]) -> Series:
    found: Series = defaultdict(list)
    for each in figures:
        for name, value in each.values.items():
            found[name].append((each.step, value))
    return dict(found)


def said(bench: FinetuneBench, *words: str) -> list[str]:
    return [line for line in bench.progress.said if all(word in line for word in words)]


async def test_a_sink_gets_what_the_files_have(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch, num_examples=4) as bench:
        configure(bench, "standin_recording")
        summary = await bench.run(validation_dataset="validation.json", validation_interval=1)
        assert summary.outcome == "succeeded", summary.reason
        assert series(GOT) == own_figures(bench.project)
        assert [each.number for each in GOT] == list(range(len(GOT)))
        assert GOT[1].texts["step/verdict"] == bench.project.lines("steps.jsonl")[0]["verdict"]["sentence"]
        assert ENDS == ["succeeded"]
        start = STARTS[0]
        assert (start.name, start.run_id) == ("small", summary.run_id)
        assert start.config["finetuning"]["groups_per_step"] == 2
        assert start.config["llms"]["policy"]["api_key"] == "**********"
        assert start.lineage["base_model"] == "tiny"
        assert {each["role"] for each in start.lineage["inputs"]} >= {"agent", "reward"}
        stored = [(each.store, each.rollout.rollout_id, each.rollout.reward) for each in ROLLOUTS]
        assert len(stored) == len(set(stored)) == 2 * 4 * 2 + 4 * sum(v["epoch"] >= 0 for v in _all(bench))
        assert ROLLOUTS[-1].rollout.details().output is not None
        assert said(bench, "sink standin_recording (run standin-1)", f"{len(GOT)} figures and {len(stored)}")


def _all(bench: FinetuneBench) -> list[dict[str, Any]]:
    return bench.validations(all_of_them=True)


async def test_a_resumed_run_goes_on_under_its_id_and_repeats_nothing(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch, num_examples=4) as bench:
        configure(bench, "standin_recording", num_epochs=1)
        await bench.run()
        assert len(GOT) == 3
        configure(bench, {"_type": "standin_recording"}, "standin_hanging", num_epochs=2)
        monkeypatch.setattr(sinks, "CLOSE_SECONDS", 0.2)
        summary = await bench.run()
        assert summary.outcome == "succeeded", summary.reason
        assert series(GOT) == own_figures(bench.project)
        assert [start.known_as for start in STARTS if start.known_as] == ["standin-1"]


async def test_what_a_killed_process_did_not_send_comes_first(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch, num_examples=4) as bench:
        configure(bench, "standin_recording", num_epochs=1)
        await bench.run()
        state = next((bench.project.output / "sinks").iterdir())
        content = json.loads(state.read_text())
        assert content["num_figures"] == 3
        state.write_text(json.dumps({**content, "num_figures": 1}))  # as if it had been killed there
        del GOT[1:]
        configure(bench, "standin_recording", num_epochs=2)
        await bench.run()
        assert [each.number for each in GOT] == list(range(6))
        assert series(GOT) == own_figures(bench.project)


async def test_a_sink_that_fails_costs_only_its_own_figures(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch, num_examples=4) as bench:
        configure(bench, "standin_raising", "standin_unopened")
        summary = await bench.run()
        assert (summary.outcome, summary.updates) == ("succeeded", 4), summary.reason
        assert [each.number for each in GOT] == [1]
        assert said(bench, "WARNING sink standin_raising: 5 not sent: ConnectionError: the product is away")
        assert said(bench, "WARNING sink standin_unopened", "22 not sent", "SystemExit: no key")
        early = said(bench, "standin_unopened", "the run goes on")
        assert len(early) == 1
        assert bench.progress.said.index(early[0]) < len(bench.progress.said) - 4


async def test_a_sink_that_hangs_holds_nothing_up(tmp_path, monkeypatch):
    monkeypatch.setattr(sinks, "CLOSE_SECONDS", 0.5)
    monkeypatch.setattr(feed, "MAX_QUEUED", 3)
    async with open_bench(tmp_path, monkeypatch, num_examples=4) as bench:
        configure(bench, "standin_hanging")
        began = time.monotonic()
        summary = await bench.run()
        assert (summary.outcome, summary.updates) == ("succeeded", 4), summary.reason
        assert time.monotonic() - began < 30
        assert said(bench, "WARNING sink standin_hanging", "not sent: it could not keep up")
        assert said(bench, "WARNING sink standin_hanging: 3 not sent: it did not answer in time at the end")


async def test_a_rollout_that_waits_for_its_groups_score_is_sent_once_with_it(tmp_path, monkeypatch):
    unscored = Rollout("r", "example", 0, Ending.COMPLETED, None)
    async with open_bench(tmp_path, monkeypatch) as bench:
        async with bench.opened() as (run, _):
            start = RunStart(run.run_id, "small", run.directory.path, {}, {})
            config = ComponentConfig.model_validate({"_type": "standin_recording"})
            built = [(config, RecordingStandin(config, None))]
            async with sinks.Sinks(built, run.directory, start, run.progress):
                with run.directory.store("epoch-0000") as store:
                    store.append(unscored)
                    store.append(Rollout("r", "example", 0, Ending.COMPLETED, 0.5))
                    store.append(Rollout("failed", "example", 1, Ending.TIMEOUT, None))
    assert [(sent.rollout.rollout_id, sent.rollout.reward) for sent in ROLLOUTS] == [
        ("r", 0.5),
        ("failed", None),
    ]


@pytest.mark.parametrize(
    ("name", "package"),
    [("wandb", "wandb"), ("mlflow", "mlflow"), ("tensorboard", "tensorboardX"), ("trackio", "trackio")],
)
async def test_a_missing_library_is_rejected_before_anything_runs(tmp_path, monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    async with open_bench(tmp_path, monkeypatch) as bench:
        configure(bench, name)
        with pytest.raises(InvalidRequest, match=f"the sink `{name}` needs the package {package}") as caught:
            await bench.run()
        assert caught.value.hint.startswith(f"pip install {package}")
        assert not bench.project.output.exists()
        lines: list[str] = []
        assert not await dry_run(bench.loaded(), lines.append)
        assert "pip install" in "\n".join(lines)


async def test_the_same_sink_twice_is_rejected(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch) as bench:
        configure(bench, "standin_recording", {"_type": "standin_recording"})
        with pytest.raises(InvalidRequest, match=r"sinks\.1 repeats"):
            await bench.run()


async def test_an_unknown_sink_is_rejected_with_the_nearest(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch) as bench:
        configure(bench, "wanbd")
        with pytest.raises(InvalidRequest, match="did you mean `wandb`"):
            bench.loaded()


def point_at(monkeypatch: pytest.MonkeyPatch, server: RecordingServer) -> None:
    monkeypatch.setenv("LANGFUSE_BASE_URL", server.url)
    monkeypatch.setenv("LANGFUSE_PUBLIC_KEY", "pk-lf-1")
    monkeypatch.setenv("LANGFUSE_SECRET_KEY", "sk-lf-2")


async def test_langfuse_gets_a_trace_and_a_score_for_each_rollout(tmp_path, monkeypatch):
    server = RecordingServer()
    point_at(monkeypatch, server)
    async with open_bench(tmp_path, monkeypatch, num_examples=4) as bench:
        configure(bench, "langfuse", num_epochs=1)
        summary = await bench.run()
        names = ["epoch-0000-step-0000", "epoch-0000-step-0001"]
        records = {each["rollout_id"]: each for name in names for each in bench.records(name)}
    await asyncio.to_thread(server.close)
    spans = [
        span
        for body in server.bodies("/api/public/otel/v1/traces")
        for resource in body["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]
    found = {span["traceId"]: _attributes(span) for span in spans}
    assert len(found) == len(spans) == len(records) == 8
    for rollout_id, record in records.items():
        values = found[trace_id(rollout_id)]
        assert values["session.id"] == summary.run_id
        assert values["langfuse.trace.output"] == record["output"]
        assert values["langfuse.trace.metadata.example_id"] == record["example_id"]
    scores = [each for body in server.bodies("/api/public/ingestion") for each in body["batch"]]
    assert {(each["body"]["traceId"], each["body"]["name"], each["body"]["value"]) for each in scores} == {
        (trace_id(rollout_id), "reward", record["reward"]) for rollout_id, record in records.items()
    }
    headers = server.got[0][1]
    assert headers["Authorization"] == "Basic cGstbGYtMTpzay1sZi0y"
    assert headers["x-langfuse-ingestion-version".title()] == "4"
    assert "sk-lf-2" not in json.dumps([body for _, _, body in server.got])
    assert said(bench, "sink langfuse", "8 rollouts sent")


async def test_scores_that_langfuse_rejects_are_counted(tmp_path, monkeypatch):
    server = RecordingServer(errors=[{"id": "x", "status": 400, "message": "no such project"}])
    point_at(monkeypatch, server)
    async with open_bench(tmp_path, monkeypatch, num_examples=4) as bench:
        configure(bench, "langfuse", num_epochs=1)
        summary = await bench.run()
    await asyncio.to_thread(server.close)
    assert summary.outcome == "succeeded"
    lost = said(bench, "WARNING sink langfuse", "not sent: Langfuse rejected", "no such project")
    assert sum(int(line.split(": ")[1].split()[0]) for line in lost) == 8


async def test_langfuse_without_keys_is_rejected(tmp_path, monkeypatch):
    monkeypatch.delenv("LANGFUSE_PUBLIC_KEY", raising=False)
    async with open_bench(tmp_path, monkeypatch) as bench:
        configure(bench, "langfuse")
        with pytest.raises(InvalidRequest, match="has no keys") as caught:
            await bench.run()
        assert "LANGFUSE_PUBLIC_KEY" in caught.value.hint


def _attributes(span: dict[str, Any]) -> dict[str, Any]:
    return {each["key"]: next(iter(each["value"].values())) for each in span["attributes"]}
