"""The real libraries of the sinks: what they read back equals the run's own files, also after a resume.

They need an environment of their own: `make sinks`. wandb, mlflow-skinny, tensorboardX with tensorboard to
read, trackio, and langfuse for the types of its API.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.finetune_bench import FinetuneBench, agent, by_generation, one_call, open_bench, rewards
from tests.support.own_figures import Series, own_figures
from tests.support.recording_server import RecordingServer
from tests.unit.whole_path.test_figures_reach_sinks import point_at

pytest.importorskip("wandb", reason="run `make sinks`")
pytestmark = pytest.mark.timeout(300)


def configure(bench: FinetuneBench, sink: Any, num_epochs: int) -> None:
    bench.project.configure(
        workflow=agent(one_call),
        eval=rewards(by_generation),
        trajectory_builders={"groups": {"num_generations": 2}},
        finetuning={"num_epochs": num_epochs, "groups_per_step": 2},
        sinks=[sink],
    )


async def run_and_resume(bench: FinetuneBench, sink: Any) -> Series:
    """Run one epoch, then resume for another, as a user does; return the figures of the run's files."""
    for num_epochs in (1, 2):
        configure(bench, sink, num_epochs)
        options = ("--validation_dataset=validation.json", "--validation_interval=1")
        ended = await asyncio.to_thread(bench.project.run, *options, timeout=140)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "not sent" not in ended.stdout + ended.stderr
    return own_figures(bench.project)


async def test_tensorboard_reads_what_the_files_have(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    async with open_bench(tmp_path, monkeypatch, num_examples=4) as bench:
        own = await run_and_resume(bench, "tensorboard")
        read = EventAccumulator(str(bench.project.output / "tensorboard"), size_guidance={"scalars": 0})
        read.Reload()
        found = {
            tag: [(each.step, each.value) for each in read.Scalars(tag)] for tag in read.Tags()["scalars"]
        }
        assert found == {
            name: [(step, _float32(value)) for step, value in each] for name, each in own.items()
        }


async def test_mlflow_reads_what_the_files_have(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    async with open_bench(tmp_path, monkeypatch, num_examples=4) as bench:
        own = await run_and_resume(bench, {"_type": "mlflow", "experiment": "shop"})
        import mlflow

        client = mlflow.MlflowClient()
        experiment = client.get_experiment_by_name("shop")
        assert experiment is not None
        [run] = client.search_runs([experiment.experiment_id])
        found = {
            name: sorted((each.step, each.value) for each in client.get_metric_history(run.info.run_id, name))
            for name in run.data.metrics
        }
        assert found == {name: sorted(each) for name, each in own.items()}
        assert run.info.status == "FINISHED"
        assert run.data.params["finetuning.groups_per_step"] == "2"
        assert run.data.params["lineage.base_model"] == "tiny"
        assert "default" not in {v for k, v in run.data.params.items() if k.endswith("api_key")}
        assert run.data.tags["step.verdict"]


async def test_wandb_offline_keeps_what_the_files_have(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    async with open_bench(tmp_path, monkeypatch, num_examples=4) as bench:
        own = await run_and_resume(bench, {"_type": "wandb", "project": "shop"})
        files = sorted(bench.project.output.glob("wandb/offline-run-*/*.wandb"))
        run_id = bench.project.json("config.json")["run_id"]
    assert [file.stem for file in files] == [f"run-{run_id}"] * 2
    rows = [row for file in files for row in _wandb_rows(file)]
    found: Series = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            if "/" in name and not name.startswith("_"):
                found[name].append((row["insitu_step"], value))
    assert dict(found) == own


async def test_wandb_without_a_key_is_rejected(tmp_path, monkeypatch):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    import wandb

    from insitu.errors import InvalidRequest

    wandb.teardown()
    async with open_bench(tmp_path, monkeypatch, num_examples=4) as bench:
        configure(bench, "wandb", 1)
        with pytest.raises(InvalidRequest, match="has no key"):
            await bench.run()


async def test_trackio_reads_what_the_files_have(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch, num_examples=4) as bench:
        own = await run_and_resume(bench, {"_type": "trackio", "project": "shop"})
        run_id = bench.project.json("config.json")["run_id"]
        from trackio.sqlite_storage import SQLiteStorage

        assert SQLiteStorage.get_runs("shop") == [f"small-{run_id}"]
        found: Series = defaultdict(list)
        for row in SQLiteStorage.get_logs("shop", f"small-{run_id}"):
            for name, value in row.items():
                if isinstance(value, int | float) and "/" in name:
                    found[name].append((row["step"], value))
        assert dict(found) == own


async def test_langfuses_own_types_accept_the_scores(tmp_path, monkeypatch):
    from langfuse.api import ScoreBody

    server = RecordingServer()
    point_at(monkeypatch, server)
    async with open_bench(tmp_path, monkeypatch, num_examples=4) as bench:
        configure(bench, "langfuse", 1)
        await bench.run()
    await asyncio.to_thread(server.close)
    scores = [each for body in server.bodies("/api/public/ingestion") for each in body["batch"]]
    parsed = [ScoreBody.model_validate(each["body"]) for each in scores]
    assert [each.value for each in parsed] == [each["body"]["value"] for each in scores]
    assert len(parsed) == 8
    _check_spans(server)


def _check_spans(server: RecordingServer) -> None:
    """The spans parse as OTLP, by the messages of OpenTelemetry itself."""
    from google.protobuf.json_format import ParseDict
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    for body in server.bodies("/api/public/otel/v1/traces"):
        parsed = ParseDict(body, ExportTraceServiceRequest())
        spans = [span for each in parsed.resource_spans for scope in each.scope_spans for span in scope.spans]
        assert spans
        assert all(span.end_time_unix_nano >= span.start_time_unix_nano > 0 for span in spans)


def _float32(value: float) -> float:
    """The value as an event file keeps it."""
    return struct.unpack("f", struct.pack("f", value))[0]


def _wandb_rows(file: Path) -> list[dict[str, Any]]:
    """The history in a .wandb file: a log of LevelDB that holds wandb's own messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows: list[dict[str, Any]] = []
    for data in _log_entries(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append(
                {each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in items}
            )
    return rows


def _log_entries(content: bytes) -> Iterator[bytes]:
    """Blocks of 32 KiB; parts of entries, each after CRC (4), length (2) and kind (1: whole, 2-4: parts)."""
    block, at, parts = 32 * 1024, 7, b""
    while at + 7 <= len(content):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""
