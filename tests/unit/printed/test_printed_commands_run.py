"""Every command that insitu prints for the user to run next, run as it was printed.

`ROWS` has a row for every such command in the sources. A situation provokes the message, takes the command
out of it, replaces nothing but the words in capitals, and runs it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from sqlalchemy import update

from insitu.backend.ledger import schema
from insitu.demo.commands import Commands
from insitu.demo.demo import Demo, write_project
from insitu.demo.figures import Figures, read_figures
from insitu.doctor.backend import check_backend
from insitu.errors import InsituError
from insitu.trained.promotion import promote
from insitu.workflow.hints import overflow_hint
from tests.support.printed_commands import printed_commands
from tests.unit.printed.place import RUN, Place, open_place

ROOT = Path(__file__).resolve().parents[3]
Situation = Callable[[Place, str], None]
pytestmark = pytest.mark.timeout(120)


@dataclass(frozen=True, slots=True)
class Filled:
    """A message of the supervisor, which a stand-in has none of: its template is run with these values."""

    values: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Another test runs the command: `file::function`."""

    test: str
    why: str


@dataclass(frozen=True, slots=True)
class Mention:
    """The text names an option or a command whose value is the user's; it does not tell to run it so."""

    why: str


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with open_place(tmp_path, monkeypatch) as opened:
        yield opened


# Keys


def a_key_of_that_name(place: Place, template: str) -> None:
    state = ["--state-dir", str(place.path / "other state")]
    place.passed("keys", "create", "agent", "--scope", "infer", *state)
    said = place.rejected("keys", "create", "agent", "--scope", "infer", *state)
    place.monkeypatch.delenv("INSITU_STATE_DIR")
    assert "agent" in place.followed(said, template)


def too_many_keys(place: Place, template: str) -> None:
    place.monkeypatch.setattr("insitu.access.key_changes.MAX_KEYS", 1)
    place.passed("keys", "create", "first", "--scope", "infer")
    said = place.rejected("keys", "create", "second", "--scope", "infer")
    place.followed(said, template, NAME="first")


def created(place: Place, *words: str) -> str:
    """Create a key and return it."""
    said = place.passed("keys", "create", *words)
    found = re.search(r"\binsitu-[\w-]{20,}|\b[\w-]{40,}", said)
    assert found, said
    return found[0]


def a_key_of_another_project(place: Place, template: str) -> None:
    key = created(place, "team", "--scope", "submit", "--scope", "infer", "--project", "team-a")
    place.monkeypatch.setenv("INSITU_API_KEY", key)
    backend = {"project": "team-b", "api_key": key}
    place.project.configure(
        llms={"policy": {"api_key": key}}, trainer_adapters={"backend": {"backend": backend}}
    )
    said = place.rejected("finetune", "--config_file=config.yml")
    assert "team-b" in place.followed(said, template, NAME="other-team")


def a_key_without_the_scope(place: Place, template: str) -> None:
    key = created(place, "agent", "--scope", "infer")
    place.monkeypatch.setenv("INSITU_API_KEY", key)
    said = place.rejected("runs", "list", *place.url)
    words = place.told(said, "keys create NAME", NAME="reader")
    scopes = re.findall(r"--scope \w+", said.partition("keys create NAME")[2])
    assert scopes
    key = created(place, *words[2:], *" ".join(scopes).split())
    place.monkeypatch.setenv("INSITU_API_KEY", key)
    assert "no runs" in place.passed("runs", "list", *place.url)


# Runs, steps and promotions


def show_a_run_to_fork(place: Place, template: str) -> None:
    place.trained()
    said = place.rejected("runs", "fork", RUN, "other", *place.url)
    assert RUN in place.followed(said, template)


def a_forked_run(place: Place, template: str) -> None:
    place.trained()
    said = place.passed("runs", "fork", f"{RUN}@1", "other", *place.url)
    assert "other" in place.followed(said, template.rstrip("…") + "…")


def delete_a_ready_run(place: Place, template: str) -> None:
    place.trained()
    hint = place.asked(lambda client: client.delete_run(RUN))
    assert "closed" in place.followed(hint, template, *place.url)
    place.passed("runs", "delete", RUN, "--yes", *place.url)


def start_from_an_unknown_run(place: Place, template: str) -> None:
    place.project.configure(trainer_adapters={"backend": {"backend": {"init_from": "nowhere@3"}}})
    said = place.rejected("finetune", "--config_file=config.yml")
    assert "no runs" in place.followed(said, template, *place.url)


def roll_back_without_a_promotion(place: Place, template: str) -> None:
    place.trained()
    said = place.rejected("rollback", RUN, *place.url)
    assert f"get {RUN}@1" in place.followed(said, template, STEP="1")


def the_api_rolls_back_without_a_promotion(place: Place, template: str) -> None:
    place.trained()
    hint = place.asked(lambda client: client.roll_back(RUN, 1))
    place.followed(hint, template, *place.url, STEP="1")


def roll_back_an_older_promotion(place: Place, template: str) -> None:
    place.trained()
    place.passed("promote", f"{RUN}@1", *place.url)
    hint = place.asked(lambda client: client.roll_back(RUN, 99))
    assert f"{RUN}@1" in place.followed(hint, template, *place.url)


def roll_back_the_first_promotion(place: Place, template: str) -> None:
    place.trained()
    place.passed("promote", f"{RUN}@1", *place.url)
    said = place.rejected("rollback", RUN, *place.url)
    assert "newest step" in place.followed(said, template)


def roll_back_to_a_step_that_was_trained_again(place: Place, template: str) -> None:
    place.trained()
    place.passed("promote", f"{RUN}@1", *place.url)
    place.passed("promote", f"{RUN}@2", *place.url)
    changed = update(schema.promotions).where(schema.promotions.c.step == 1).values(manifest_sha256="0" * 64)
    with place.backend.ledger._engine.begin() as connection:
        connection.execute(changed)
    said = place.rejected("rollback", RUN, *place.url)
    assert f"get {RUN}@1" in place.followed(said, template)


def delete_a_promoted_checkpoint(place: Place, template: str) -> None:
    place.trained(finetuning={"num_epochs": 3})
    place.passed("promote", f"{RUN}@1", *place.url)
    hint = place.asked(lambda client: client.delete_checkpoint(RUN, 1))
    place.followed(hint, template, *place.url, STEP="3")


def promote_of_a_closed_run(place: Place, template: str) -> None:
    place.trained()
    place.passed("runs", "close", RUN, *place.url)
    said = place.passed("promote", f"{RUN}@1", *place.url)
    assert "not served yet" in said
    assert RUN in place.followed(said, template)


def a_promotion_that_cannot_be_served(place: Place, template: str) -> None:
    """The stand-in's supervisor serves everything, so the reason is put where a real one puts it."""
    place.trained()
    place.passed("promote", f"{RUN}@1", *place.url)
    place.passed("promote", f"{RUN}@2", *place.url)

    class Broken:
        async def promotions(self, run: str) -> list[Any]:
            async with place.backend.client() as client:
                return [_with_reason(each, "no room on the device") for each in await client.promotions(run)]

        async def get_run(self, run: str) -> Any:
            async with place.backend.client() as client:
                return await client.get_run(run)

        async def promote(self, run: str, step: int | None) -> Any:
            return _with_reason((await self.promotions(run))[-1], "not seen yet")

    with pytest.raises(InsituError) as caught:
        asyncio.run(promote(Broken(), RUN, 2))  # type: ignore[arg-type]
    assert RUN in place.followed(caught.value.hint, template, *place.url)


def _with_reason(promotion: Any, reason: str) -> Any:
    from dataclasses import replace

    return replace(promotion, reason=reason)


# Trainings and their files


def a_run_that_was_not_started(place: Place, template: str) -> None:
    place.project.configure()
    said = place.rejected("trajectories", "list", "config.yml")
    assert "Finished" in place.followed(said, template)
    place.passed("trajectories", "list", "config.yml")


def an_unknown_rollout(place: Place, template: str) -> None:
    place.trained(finetuning={"output_dir": "my output"})
    said = place.rejected("trajectories", "show", "my output", "nothing")
    assert "row-0" in place.followed(said, template)


def most_rollouts_fail(place: Place, template: str) -> None:
    agent = place.path / "small_agent.py"
    failing = 'async def answer(value, context):\n    if int(context.rollout_id.split(".")[3]) % 2:\n'
    failing += '        raise RuntimeError("no tool")\n    return await told(value, context)\n'
    agent.write_text(agent.read_text().replace("async def answer(", "async def told(") + failing)
    said = place.trained()
    shown = place.followed(said, template)
    assert "tool_error" in shown


def a_constant_reward(place: Place, template: str) -> None:
    agent = place.path / "small_agent.py"
    agent.write_text(agent.read_text() + "\n\ndef reward(item):\n    return 0.0\n")
    place.project.configure(finetuning={"num_epochs": 3})
    _, said = place.run("finetune", "--config_file=config.yml")
    assert "row-0" in place.followed(said, template)


def a_wrong_option(place: Place, template: str) -> None:
    place.project.configure()
    said = place.rejected("finetune", "--config_file=config.yml", "--validation_interval=0")
    assert "--validation_interval" in place.followed(said, template)


def broken_then_repaired(place: Place, template: str) -> None:
    agent = place.path / "small_agent.py"
    working = agent.read_text()
    agent.write_text(working.replace("return messages[-1]", "return nothing[-1]"))
    place.project.configure()
    said = place.rejected("try", "config.yml")
    agent.write_text(working)
    assert "next: insitu finetune" in place.followed(said, template)


def a_trial_that_worked(place: Place, template: str) -> None:
    place.project.configure()
    said = place.passed("try", "config.yml")
    place.followed(said, template)
    assert not place.project.output.exists()


def a_trial_of_given_rollouts(place: Place, template: str) -> None:
    config = ROOT / "examples" / "addition" / "sft.yml"
    document = yaml.safe_load(config.read_text())
    for llm in document["llms"].values():
        llm |= {"base_url": f"{place.backend.gateway_url}/v1", "model_name": "tiny"}
    (adapter,) = document["trainer_adapters"].values()
    adapter["backend"] |= {"port": place.backend.port, "base_model": "tiny"}
    shutil.copytree(config.parent / "data", place.path / "data")
    for name in ("agent.py", "reward.py"):
        shutil.copy(config.parent / name, place.path / name)
    document["finetuning"].pop("run_configuration", None)
    (place.path / "sft.yml").write_text(yaml.safe_dump(document))
    said = place.rejected("try", "sft.yml")
    place.followed(said, template)


def a_gain_without_an_interval(place: Place, template: str) -> None:
    place.trained()
    history = [{"epoch": 0, "step": 0, "avg_reward": 0.1}, {"epoch": 1, "step": 1, "avg_reward": None}]
    (place.project.output / "validation_history.json").write_text(json.dumps(history))
    with pytest.raises(InsituError) as caught:
        read_figures(place.project.output, 1.0)
    assert "row-0" in place.followed(caught.value.hint, template)


def the_end_of_the_demo(place: Place, template: str) -> None:
    place.trained()
    said: list[str] = []
    demo = Demo(place.path, said.append, sys.stdout)
    figures = _FIGURES
    for name in ("validation-0000", f"remeasured-{2:06}"):
        shutil.copy(
            place.project.output / "trajectories" / "epoch-0000.jsonl",
            place.project.output / "trajectories" / f"{name}.jsonl",
        )
    demo._tell(figures, Commands(place.path / place.model("model"), place.path, 7001, 7002))
    whole = "\n".join(said)
    assert "row-0" in place.followed(whole, template)
    settings = place.served(place.told(whole, "serve --model … --model-name … --state-dir … --port …"))
    assert settings.port == 7001
    assert "http://127.0.0.1:7002/v1/chat/completions" in whole
    (start,) = re.findall(r"^  insitu (init .*)$", whole, re.MULTILINE)
    assert "insitu try config.yml" in place.passed(*shlex.split(start))


def the_demo_in_another_folder(place: Place, template: str) -> None:
    (place.path / "full").mkdir()
    (place.path / "full" / "thesis.tex").write_text("years of work")
    started: list[Path] = []
    place.monkeypatch.setattr("insitu.demo.demo.check_installed", lambda: None)
    place.monkeypatch.setattr("insitu.demo.demo.fetch_model", lambda: place.path / "model")
    said = place.rejected("demo", "--dir", "full")

    def run(self: Demo) -> Figures:
        write_project(self.folder)
        started.append(self.folder)
        return _FIGURES

    place.monkeypatch.setattr(Demo, "run", run)
    place.followed(said, template, NAME="elsewhere")
    assert [folder.name for folder in started] == ["elsewhere"]


def a_demo_whose_training_fails(place: Place, template: str) -> None:
    folder = place.path / "demo"
    write_project(folder)
    (folder / "output").mkdir()
    with pytest.raises(InsituError) as caught:
        Demo(folder, print, sys.__stdout__ or sys.stdout)._train(
            [sys.executable, "-c", "raise SystemExit(3)"]
        )
    place.monkeypatch.setattr(Demo, "run", lambda self: write_project(self.folder) or _FIGURES)
    place.followed(caught.value.hint, template)


_FIGURES = Figures(0.1, None, 0.5, None, 0.3, 0.5, 0.95, 2, 1.0)


def an_old_configuration(place: Place, template: str) -> None:
    old = yaml.safe_load((place.path / "config.yml").read_text())
    (place.path / "old.yml").write_text(yaml.safe_dump(old, sort_keys=False))
    said = place.passed("migrate", "old.yml", "--output", "new.yml")
    place.followed(said, template)


def an_old_configuration_with_work_left(place: Place, template: str) -> None:
    old = yaml.safe_load((place.path / "config.yml").read_text())
    old["workflow"] = {"_type": "react_agent", "llm_name": "policy"}
    (place.path / "old.yml").write_text(yaml.safe_dump(old, sort_keys=False))
    code, said = place.run("migrate", "old.yml", "--output", "new.yml")
    words = place.told(said, template)
    done = yaml.safe_load((place.path / "config.yml").read_text())
    (place.path / "new.yml").write_text(yaml.safe_dump(done, sort_keys=False))
    assert "next: insitu finetune" in place.passed(*words), code


def a_name_that_is_none(place: Place, template: str) -> None:
    said = place.rejected("init", "My Shop!")
    assert "reward.py" in place.followed(said, template)


def a_merged_backend(place: Place, template: str) -> None:
    place.backend.publication = "merged"
    with open_place(place.path / "merged", place.monkeypatch, "merged") as other:
        other.trained()
        said = other.rejected("promote", f"{RUN}@1", *other.url)
        assert f"{RUN}@1" in other.followed(said, template, DIRECTORY="exported")
        assert (other.path / "exported" / "adapter_model.safetensors").is_file()


# Backends to start


def no_backend(place: Place, template: str) -> None:
    place.project.configure(trainer_adapters={"backend": {"backend": {"port": 9}}})
    said = place.rejected("finetune", "--config_file=config.yml", "--dry-run")
    words = place.told(said, template, DIRECTORY_OR_HUB_ID=place.model("org/model"))
    settings = place.served(words)
    assert (settings.model, settings.model_name) == ("org/model", "tiny")


def another_model_is_served(place: Place, template: str) -> None:
    place.model("org/other")
    other = {"llms": {"policy": {"model_name": "org/other"}}}
    place.project.configure(**other, trainer_adapters={"backend": {"backend": {"base_model": "org/other"}}})
    said = place.rejected("try", "config.yml")
    assert place.served(place.told(said, template)).model == "org/other"


def a_client_without_a_backend(place: Place, template: str) -> None:
    place.backend.port, port = 9, place.backend.port
    hint = place.asked(lambda client: client.list_runs())
    place.backend.port = port
    assert place.served(place.told(hint, template)).model is None


def an_adapter_without_a_backend(place: Place, template: str) -> None:
    from insitu.harness.interfaces.trainer_adapter import TrainerAdapter

    class Sick:
        async def is_healthy(self) -> bool:
            return False

    with pytest.raises(InsituError) as caught:
        asyncio.run(TrainerAdapter.check(Sick()))  # type: ignore[arg-type]
    assert place.served(place.told(caught.value.hint, template)).model is None


def the_doctor_finds_no_backend(place: Place, template: str) -> None:
    async def findings() -> list[str]:
        return [f"{each.detail} {each.hint}" async for each in check_backend("http://127.0.0.1:9")]

    said = "\n".join(asyncio.run(findings()))
    words = place.told(said, template, DIRECTORY_OR_HUB_ID=place.model("org/model"))
    assert place.served(words).model == "org/model"


def a_context_that_is_too_short(place: Place, template: str) -> None:
    said = overflow_hint("maximum context length is 2048 tokens. However, you requested 3000 tokens")
    assert place.served(place.told(said, template)).max_seq_length == 4096


def a_context_of_unknown_length(place: Place, template: str) -> None:
    words = place.told(overflow_hint("too long"), template)
    assert words[-1] == "N"
    assert place.served([*words[:-1], "4096"]).max_seq_length == 4096


def a_restored_backend(place: Place, template: str) -> None:
    place.trained()
    place.passed("backup", "copy")
    said = place.passed("restore", "copy", "--state-dir", "new state")
    words = place.told(said, template)
    assert words.pop() == "…"
    settings = place.served([*words, "--model", place.model("org/model")])
    assert (settings.state_dir, settings.model) == (place.path / "new state", "org/model")


def a_model_that_does_not_fit(place: Place, template: str) -> None:
    from insitu.doctor.machine import check_machine
    from tests.support.known_models import CONFIGS

    model = place.path / "model"
    model.mkdir()
    (model / "config.json").write_text("{")
    (said,) = [each.hint for each in check_machine(str(model), place.path) if each.name == "memory"]
    (model / "config.json").write_text(json.dumps(CONFIGS["qwen2.5-1.5b"]))
    words = place.told(said, template)
    place.passed(*words, "--device-memory", "24GiB", "--num-devices", "1", "--device", "cuda")


BESIDE_A_SUPERVISOR = "said by the supervisor of a real backend while it admits a run or serves a step"
OPTION = "names an option of `insitu serve`; the value is the user's"
DOCTOR = Elsewhere(
    "tests/integration/test_doctor.py::run_doctor", "the check of a device needs a real engine and trainer"
)

DAMAGED = "tests/faults/test_damaged_files.py::test_an_older_ledger_opens_nothing_and_trains_nothing_twice"

ROWS: dict[tuple[str, str], Situation | Filled | Elsewhere | Mention] = {
    ("access/key_changes.py", "keys revoke … --state-dir …"): a_key_of_that_name,
    ("access/key_changes.py", "keys revoke NAME --state-dir …"): too_many_keys,
    ("access/projects.py", "keys create NAME --scope submit --project …"): a_key_of_another_project,
    ("access/scopes.py", "keys create NAME …"): a_key_without_the_scope,
    ("backend/api/routes_versions.py", "export … DIRECTORY"): a_merged_backend,
    ("backend/backup/backup.py", "serve --keep-checkpoints"): Mention(OPTION),
    ("backend/ledger/checkpoints.py", "promote …@STEP"): delete_a_promoted_checkpoint,
    ("backend/ledger/promotions.py", "promote …"): roll_back_to_a_step_that_was_trained_again,
    ("backend/ledger/promotions.py", "promote … --newest"): roll_back_the_first_promotion,
    ("backend/ledger/promotions.py", "promote …@STEP"): the_api_rolls_back_without_a_promotion,
    ("backend/ledger/promotions.py", "runs show …"): roll_back_an_older_promotion,
    ("backend/damage.py", "runs delete …"): Elsewhere(DAMAGED, "no run here is damaged"),
    ("backend/ledger/registrations.py", "runs close …"): delete_a_ready_run,
    ("backend/ledger/runs.py", "runs delete …"): Elsewhere(DAMAGED, "no run here is damaged"),
    ("backend/ledger/registrations.py", "runs list"): Filled((), "a run waits for another's checkpoint"),
    ("backend/plan/teachers.py", "serve --teacher"): Mention(OPTION),
    ("backend/serving/host.py", "serve --teacher NAME=URL"): Elsewhere(
        "tests/unit/printed/test_printed_commands_run.py::test_a_teacher_is_named", BESIDE_A_SUPERVISOR
    ),
    ("backend/serving/promotions.py", "runs show …"): Filled((RUN,), BESIDE_A_SUPERVISOR),
    ("backend/serving/registration.py", "promote … --newest"): Filled((RUN,), BESIDE_A_SUPERVISOR),
    ("backend/serving/registration.py", "runs close NAME"): Filled((RUN,), BESIDE_A_SUPERVISOR),
    ("backend/serving/registration.py", "runs release …"): Filled((RUN,), BESIDE_A_SUPERVISOR),
    ("backend/serving/registration.py", "runs show …"): Filled((RUN,), BESIDE_A_SUPERVISOR),
    ("backend/serving/registration.py", "serve --model"): Mention(OPTION),
    ("cli/backup.py", "serve --state-dir … …"): a_restored_backend,
    ("cli/migrate.py", "finetune --config_file=… --dry-run"): an_old_configuration,
    ("cli/migrate.py", "migrate …"): an_old_configuration_with_work_left,
    ("cli/promotion.py", "runs show ……"): promote_of_a_closed_run,
    ("cli/runs.py", "runs show ……"): a_forked_run,
    ("demo/demo.py", "demo --dir NAME"): the_demo_in_another_folder,
    ("demo/demo.py", "demo --dir …"): a_demo_whose_training_fails,
    ("demo/demo.py", "trajectories list …"): the_end_of_the_demo,
    ("demo/demo.py", "view …"): Elsewhere(
        "tests/unit/view/test_view_command.py::test_the_command_serves_a_run_until_it_is_interrupted",
        "it serves until it is interrupted",
    ),
    ("demo/figures.py", "trajectories list …"): a_gain_without_an_interval,
    ("doctor/backend.py", "serve --model DIRECTORY_OR_HUB_ID"): the_doctor_finds_no_backend,
    ("doctor/device.py", "doctor --device --model DIRECTORY_OR_HUB_ID"): DOCTOR,
    ("doctor/machine.py", "plan --model …"): a_model_that_does_not_fit,
    ("doctor/trainer_side.py", "doctor --device --model …"): DOCTOR,
    ("harness/backend_adapter.py", "keys create"): Mention("names the command that makes keys"),
    ("harness/backend_adapter.py", "serve --port"): Mention(OPTION),
    ("harness/gateway_check.py", "keys create"): Mention("names the command that makes keys"),
    (
        "harness/interfaces/trained_model.py",
        "serve --model DIRECTORY_OR_HUB_ID --model-name …",
    ): no_backend,
    ("harness/interfaces/trained_model.py", "serve --model …"): another_model_is_served,
    ("harness/interfaces/trainer_adapter.py", "serve"): an_adapter_without_a_backend,
    ("harness/options.py", "finetune --help"): a_wrong_option,
    ("harness/rollouts/capture.py", "trajectories list OUTPUT_DIR"): Filled(
        ("output",), "the backend would have to train on other calls than those that were submitted"
    ),
    ("harness/screen/run_reader.py", "finetune --config_file=…"): a_run_that_was_not_started,
    ("harness/screen/run_reader.py", "trajectories list …"): an_unknown_rollout,
    ("harness/start.py", "runs list"): start_from_an_unknown_run,
    ("harness/trial/lines.py", "finetune --config_file=… --dry-run"): a_trial_that_worked,
    ("harness/trial/lines.py", "try …"): broken_then_repaired,
    ("harness/trial/trial.py", "finetune --config_file=… --dry-run"): a_trial_of_given_rollouts,
    ("harness/trial/resampling.py", "runs list"): Filled((), "the backend would have to be busy for minutes"),
    ("harness/verdicts/rules.py", "trajectories list {output_dir}"): a_constant_reward,
    ("harness/verdicts/rules.py", "trajectories list {output_dir} --ending {ending}"): most_rollouts_fail,
    ("harness/verdicts/verdict.py", "trajectories list …"): Filled(
        ("output",), "it takes a dozen steps without any change"
    ),
    ("scaffold/project.py", "init …"): a_name_that_is_none,
    ("testing/models.py", "demo --model DIRECTORY"): Elsewhere(
        "tests/unit/demo/test_model_download.py::test_a_model_on_this_machine_needs_no_download",
        "the demo itself takes minutes",
    ),
    ("trained/fork.py", "runs show …"): show_a_run_to_fork,
    ("trained/promotion.py", "promote … --newest"): a_promotion_that_cannot_be_served,
    ("trained/promotion.py", "promote …@STEP"): roll_back_without_a_promotion,
    ("trained/promotion.py", "rollback …"): a_promotion_that_cannot_be_served,
    ("training/model/branch_verdict.py", "doctor --device"): DOCTOR,
    ("view/answers/resampling.py", "view"): Elsewhere(
        "tests/unit/view/test_view_command.py::test_the_command_serves_a_run_until_it_is_interrupted",
        "said by a page",
    ),
    ("view/answers/rescoring.py", "view"): Elsewhere(
        "tests/unit/view/test_view_command.py::test_the_command_serves_a_run_until_it_is_interrupted",
        "said by a page",
    ),
    ("wire/transport.py", "serve"): a_client_without_a_backend,
    ("workflow/hints.py", "serve --max-seq-length N"): a_context_of_unknown_length,
    ("workflow/hints.py", "serve --max-seq-length …"): a_context_that_is_too_short,
}


def test_every_printed_command_has_a_row() -> None:
    printed = set(printed_commands())
    assert not printed - ROWS.keys(), "a new command is printed: add a row that runs it"
    assert not ROWS.keys() - printed, "no longer printed"


SITUATIONS = {key: row for key, row in ROWS.items() if not isinstance(row, Filled | Elsewhere | Mention)}


@pytest.mark.parametrize("key", SITUATIONS, ids=lambda key: f"{key[0]}: {key[1]}")
def test_it_runs_as_it_was_printed(key: tuple[str, str], place: Place) -> None:
    if key[1].startswith("serve") or "demo.py" in key[0]:
        pytest.importorskip("ray", reason="`insitu serve` needs the backend's packages")
    SITUATIONS[key](place, key[1])


@pytest.mark.parametrize(
    "key",
    [key for key, row in ROWS.items() if isinstance(row, Filled)],
    ids=lambda key: f"{key[0]}: {key[1]}",
)
def test_a_message_of_a_real_backend_names_a_command_that_runs(key: tuple[str, str], place: Place) -> None:
    row = ROWS[key]
    assert isinstance(row, Filled)
    place.trained()
    words = key[1].split()
    values = iter(row.values)
    words = [next(values) if word == "…" or word.isupper() else word for word in words]
    place.passed(*words, *(() if words[0] == "trajectories" else place.url))


@pytest.mark.parametrize("row", [row for row in ROWS.values() if isinstance(row, Elsewhere)])
def test_the_other_test_is_there(row: Elsewhere) -> None:
    file, _, name = row.test.partition("::")
    assert f"def {name}(" in (ROOT / file).read_text()


def test_a_teacher_is_named(place: Place) -> None:
    pytest.importorskip("ray", reason="`insitu serve` needs the backend's packages")
    settings = place.served(["serve", "--teacher", "large=http://127.0.0.1:9000/v1"])
    assert [teacher.name for teacher in settings.teachers] == ["large"]


# Commands that are put together from what the user typed


def test_the_command_that_resumes_a_failed_run(place: Place) -> None:
    place.project.configure()
    place.backend.fail_next_job = "the device is on fire"
    said = place.rejected("finetune", "--config_file=config.yml", "-o", "finetuning.num_epochs", "1")
    shown = place.followed(said, "finetune --config_file=config.yml -o finetuning.num_epochs 1")
    assert "Finished" in shown


def test_the_command_that_accepts_an_edited_reward(place: Place) -> None:
    place.trained()
    agent = place.path / "small_agent.py"
    agent.write_text(agent.read_text().replace("2**32", "2**31"))
    command = ["finetune", "--config_file=config.yml", "-o", "finetuning.num_epochs", "3"]
    said = place.rejected(*command)
    place.followed(said, f"{shlex.join(command)} --accept-changes")


def test_the_question_to_the_trained_model_is_answered(place: Place) -> None:
    said = place.trained()
    (line,) = [line.strip() for line in said.splitlines() if line.strip().startswith("curl ")]
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    done = subprocess.run(
        ["bash", "-c", f"{line} --silent --fail"], capture_output=True, timeout=30, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["choices"][0]["message"]["role"] == "assistant"


def test_a_new_project_is_tried_and_checked_by_the_commands_that_init_prints(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = json.loads(place.passed("init", "shop", "--json"))
    serve, *others = shown["commands"]
    assert re.match(r"insitu serve |\S+insitu serve ", serve) or " serve " in serve
    monkeypatch.chdir(place.path / "shop")
    here = ["-o", "backend.port", str(place.backend.port), "-o", "model.model_name", "tiny"]
    assert [shlex.split(line)[1] for line in others] == ["try", "finetune"]
    for line in others:
        words = shlex.split(line)[1:]
        place.passed(*words, *here, *(["--dry-run"] if words[0] == "finetune" else []))
