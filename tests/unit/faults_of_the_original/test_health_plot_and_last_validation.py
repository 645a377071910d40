"""Faults 16, 17 and 19 of the original harness: health checks, the plot, and when validation happens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from insitu.harness.dry_run import dry_run
from insitu.harness.files import plots
from tests.support.finetune_bench import agent, by_generation, one_call, open_bench, rewards


@asynccontextmanager
async def web_server(body: Any) -> AsyncIterator[int]:
    """Something else that answers every request with 200."""

    async def handle(request: web.Request) -> web.Response:
        return web.json_response(body)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def at_port(port: int, **backend: Any) -> dict[str, Any]:
    return {"trainer_adapters": {"backend": {"backend": {"port": port, **backend}}}}


@pytest.mark.parametrize("body", [{"status": "ok"}, [], {"service": "other", "status": "ok"}])
async def test_fault_16_another_web_server_is_no_backend(tmp_path, monkeypatch, body):
    """The original asks a hard-coded port and takes any HTTP answer for health."""
    async with open_bench(tmp_path, monkeypatch) as bench, web_server(body) as port:
        parts = {"workflow": agent(one_call), "eval": rewards(by_generation)}
        # A true backend runs elsewhere: only the configured address counts.
        bench.project.configure(**parts, **at_port(port))
        async with bench.opened() as (_, made):
            assert not await made.adapter.is_healthy()
        summary = await bench.run()
        assert summary.outcome == "failed"
        assert f"no insitu backend answers at http://127.0.0.1:{port}" in summary.reason
        bench.project.configure(**parts)
        async with bench.opened() as (_, made):
            assert await made.adapter.is_healthy()


async def test_fault_16_a_backend_that_refuses_the_key_is_not_healthy(tmp_path, monkeypatch):
    """The original's check never uses the key: the first real request is the one that fails."""
    async with open_bench(tmp_path, monkeypatch) as bench:
        parts = {"workflow": agent(one_call), "eval": rewards(by_generation)}
        bench.project.configure(**parts, **at_port(bench.backend.port, api_key="another"))
        async with bench.opened() as (_, made):
            assert not await made.adapter.is_healthy()
        said: list[str] = []
        assert not await dry_run(bench.loaded(), said.append)
        (line,) = [line for line in said if line.startswith("FAILED")]
        assert line.startswith("FAILED  backend")
        assert f"127.0.0.1:{bench.backend.port}" in line
        assert "key" in line
        assert "another" not in line
        summary = await bench.run()
        assert summary.outcome == "failed"
        assert "key" in summary.reason


async def test_fault_17_the_plot_shows_what_was_trained_on(tmp_path, monkeypatch):
    """The original never draws the filtered curve and shows the curriculum at a constant 100 %."""
    drawn: list[Any] = []
    make_figure = plots.make_figure

    def keep(*arguments: Any) -> Any:
        drawn.append(make_figure(*arguments))
        return drawn[-1]

    monkeypatch.setattr(plots, "make_figure", keep)
    async with open_bench(tmp_path, monkeypatch, num_examples=4, plots=True) as bench:
        bench.project.configure(
            workflow=agent(one_call),
            eval=rewards(by_generation),
            finetuning={
                "num_epochs": 3,
                "curriculum_learning": {
                    "enabled": True,
                    "initial_percentile": 0.25,
                    "increment_percentile": 0.5,
                    "expansion_interval": 2,
                    "min_reward_diff": 0.0,
                },
            },
        )
        assert (await bench.run()).outcome == "succeeded"
        png = (bench.project.output / "reward_plot.png").read_bytes()
        lines = bench.epochs()
    assert png.startswith(b"\x89PNG")
    upper, lower = drawn[-1].axes
    curves = {line.get_label(): list(line.get_ydata()) for line in upper.lines}
    # By hand: group i has the rewards (i + 1) · {1, 2, 3, 4} / 100; the best groups come first.
    means = [0.025 * (i + 1) for i in range(4)]
    assert curves["training reward"] == pytest.approx([sum(means) / 4] * 3)
    wanted = [means[3], sum(means[1:]) / 3, sum(means[1:]) / 3]
    assert curves["of the groups trained on"] == pytest.approx(wanted)
    assert list(lower.patches[0].get_data().values) == pytest.approx([25, 75, 75])
    assert [line["filtered_avg_reward"] for line in lines] == pytest.approx(wanted)
    assert [line["curriculum_percentile"] for line in lines] == [0.25, 0.75, 0.75]


def flat_in_validation(item: Any) -> float:
    return 0.5 if "validation" in item.rollout_id else by_generation(item)


@pytest.mark.parametrize(
    ("num_epochs", "interval", "early_stopping", "wanted"),
    [
        (2, 5, None, [(0, 0), (2, 2)]),
        (3, 2, None, [(0, 0), (2, 2), (3, 3)]),
        (2, 1, None, [(0, 0), (1, 1), (2, 2)]),
        (6, 2, {"patience": 1}, [(0, 0), (2, 2)]),
    ],
    ids=["once", "between", "each", "stopped-early"],
)
async def test_fault_19_the_last_weights_are_validated(
    tmp_path, monkeypatch, num_epochs, interval, early_stopping, wanted
):
    """The original validates only before an epoch: what the last update did is never known."""
    async with open_bench(tmp_path, monkeypatch, num_examples=2) as bench:
        bench.project.configure(
            workflow=agent(one_call),
            eval=rewards(flat_in_validation),
            finetuning={"num_epochs": num_epochs, "early_stopping": early_stopping},
        )
        summary = await bench.run(validation_dataset="validation.json", validation_interval=interval)
        assert summary.outcome == "succeeded", summary.reason
        assert [(entry["epoch"], entry["step"]) for entry in bench.validations()] == wanted
        # On the weights of that step, not of the one before.
        last = wanted[-1][0]
        for record in bench.records(f"validation-{last:04d}"):
            assert record["metadata"]["policy_steps"] == [last]
        assert summary.reward_after == 0.5
        assert bench.backend.num_steps == last
