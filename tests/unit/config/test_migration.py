"""`insitu migrate`: configurations of the original become ones that load, and nothing changes unsaid."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from insitu import plugins
from insitu.cli.migrate import migrate as command
from insitu.compat.nemo.migration import Migration, migrate
from insitu.compat.nemo.note import Note
from insitu.config import load_config
from insitu.errors import InsituError, InvalidRequest
from insitu.plugins import ComponentConfig, Kind
from tests.support.original_documents import blocks, original_documents

pytestmark = pytest.mark.timeout(30)

ADDITION = Path(__file__).parents[2] / "compat" / "nat_addition" / "config.yml"
VARIABLES = {
    "RUN_NAME": "adder",
    "GATEWAY_PORT": "8000",
    "API_PORT": "7623",
    "INSITU_KEY": "key-in-the-environment",
    "BASE_MODEL": "tiny",
}
LEARNING_RATE = "trainer_adapters.art_adapter.training.learning_rate"


class WithLlm(ComponentConfig):
    llm: str


def run(text: str, **environment: str) -> Migration:
    return migrate(text, "config.yml", environment)


def by_path(notes: list[Note]) -> Mapping[str, Note]:
    return {note.path: note for note in notes}


def register_what_the_documents_name() -> None:
    plugins.register(Kind.WORKFLOW, "my_workflow", WithLlm)(lambda config, parts: None)
    plugins.register(Kind.EVALUATOR, "my_custom_evaluator")(lambda config, parts: None)
    plugins.register(Kind.WORKFLOW, "addition", WithLlm)(lambda config, parts: None)
    plugins.register(Kind.EVALUATOR, "addition_reward")(lambda config, parts: None)


def seeds() -> list[str]:
    return [block for document in original_documents() for block in blocks(document, "yaml")]


def test_the_documents_files_stay_as_they_are_and_load(write: Callable[[str], Path]) -> None:
    register_what_the_documents_name()
    texts = seeds()
    assert len(texts) >= 8
    for text in texts:
        result = run(text)
        assert result.text == text
        assert not result.left_out
        assert not result.rewritten
        # A part of a file may lack the names that it refers to; nothing else is wrong with it.
        if "finetuning" in yaml.safe_load(text):
            continue
        assert [note.text for note in result.by_hand] in ([], ["is missing"], ["is missing"] * 2)
    whole = run(texts[0])
    assert not whole.by_hand
    assert load_config(write(whole.text)).config.finetuning.num_epochs == 20


def test_what_had_no_effect_there_is_said_with_its_value() -> None:
    register_what_the_documents_name()
    for text in seeds():
        training = re.search(r"learning_rate: (\S+)", text)
        notes = by_path(run(text).takes_effect)
        assert (LEARNING_RATE in notes) == (training is not None)
        if training is not None:
            assert notes[LEARNING_RATE].value == "1e-06"
            assert "5e-5" in notes[LEARNING_RATE].text
        assert "--dataset, --validation_dataset" in notes
    assert "trainer_adapters.art_adapter.training.beta" in by_path(run(seeds()[2]).takes_effect)


def test_a_workflow_of_the_toolkit_is_to_be_made_a_function_and_the_yaml_that_is_said_loads(
    write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    text = ADDITION.read_text()
    result = run(text, **VARIABLES)
    assert [note.path for note in result.by_hand] == ["workflow._type", "eval.evaluators.my_reward._type"]
    document = yaml.safe_load(result.text)
    for note in result.by_hand:
        assert note.yaml is not None
        said = yaml.safe_load(note.yaml)
        if "workflow" in said:
            assert said == {
                "workflow": {"_type": "python", "entry": "my_module:addition", "llm": "training_llm"}
            }
            document["workflow"] = said["workflow"]
        else:
            document["eval"]["evaluators"] |= said["eval"]["evaluators"]
    assert load_config(write(yaml.safe_dump(document))).config.workflow is not None
    changed = set(result.text.splitlines()) ^ set(text.splitlines())
    assert changed == {'      ip: "art:${INSITU_KEY}@127.0.0.1"', '      ip: "127.0.0.1"'}


def test_with_the_components_known_the_file_loads_and_is_the_same_but_for_the_address(
    write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    register_what_the_documents_name()
    result = run(ADDITION.read_text())
    assert not result.by_hand, "variables that are not set are no work to be done by hand"
    unset = {re.findall(r"variable (\w+) is not set", note.text)[0] for note in result.unset_variables}
    assert unset == set(VARIABLES)
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    adapter: Any = load_config(write(result.text)).config.trainer_adapters["art_adapter"]
    assert adapter.backend.url == "http://127.0.0.1:7623"


WRONG = Path(__file__).with_name("migration_wrong.yml")
SECRETS = [f"very-secret-{number}" for number in range(1, 8)]


def test_of_a_file_with_many_faults_everything_is_said_and_no_comment_is_lost() -> None:
    text = WRONG.read_text()
    result = run(text)
    assert {note.path: note.text for note in result.left_out} == {
        "general": "front end, telemetry and logging belong to the toolkit",
        "retrievers": "your function creates its own retriever",
        "llms.policy.model": "the same setting as model_name, which stays",
        "llms.policy.num_retries": "the same setting as max_retries, which stays",
        "llms.policy.optimizable_params": "belongs to `nat optimize`; here every key is sent with the call",
        "llms.policy.retry_on_errors": "calls are retried by status code (408, 409, 429, 5xx), "
        "not by message",
        "eval.general.workers": "ignored by the toolkit, unknown to insitu",
        "eval.general.validate_llm_endpoints": "insitu always checks that the gateway serves the run",
        "eval.general.per_input_user_id": "has no effect here: every rollout has an id of its own",
        "eval.general.output.job_management": "has no effect here: evaluations are not run as queued jobs",
        "eval.general.dataset.structure.trajectory_key": "trajectory_key has no effect here: trajectories "
        "come from recorded model calls, never from the dataset",
        "eval.general.dataset.s3": "datasets are local files",
        "eval.general.dataset.colour": "unknown to insitu and to the toolkit",
        "trajectory_builders.b.num_generation": "ignored by the toolkit, unknown to insitu; did you mean "
        "`num_generations`?",
        "trajectory_builders.b.reward": "the toolkit itself overrides it with finetuning.reward_function",
        "trainer_adapters.a.backend.server_config": "cannot be honoured here; engines take `engine_args`, "
        "the server its own options",
        "trainer_adapters.a.training.per_device_train_batch_size": "ignored by the toolkit, "
        "unknown to insitu",
        "finetuning.reward_function.weight": "ignored by the toolkit, unknown to insitu",
        "finetuning.epochs": "ignored by the toolkit, unknown to insitu; did you mean `num_epochs`?",
    }
    assert {note.path for note in result.by_hand} == {
        "llms.judge._type",
        "retrievers",
        "functions.search._type",
        "workflow._type",
        "workflow.prompt",
        "eval.general.dataset.s3",
        "eval.evaluators.rag._type",
        "eval.evaluators.own._type",
        "trajectory_builders.b.num_generations",
        "trainer_adapters.a.backend.name",
    }
    assert {note.path: note.value for note in result.takes_effect if note.line} == {
        "trainer_adapters.a.training.learning_rate": "1e-06",
        "trainer_adapters.a.training.beta": "0.04",
        "trainer_adapters.a.training.max_grad_norm": "0.5",
        "finetuning.seed": "7",
        "finetuning.run_configuration.validation_dataset": "'val.json'",
    }
    assert [note.path for note in result.rewritten] == [
        "llms.policy.type",
        "trainer_adapters.a.backend.ip",
        "finetuning.target_model",
    ]
    meaning = by_path(result.changed_meaning)
    assert "min_reward_diff" in meaning["finetuning.curriculum_learning.min_reward_diff"].text
    assert "which is the untrained model" in meaning["llms.policy.model_name"].text
    for comment in re.findall(r"# .*", text):
        assert comment in result.text
    lines = text.splitlines()
    for note in result.left_out + result.takes_effect + result.rewritten:
        if note.line is not None:
            assert re.search(rf"\b{note.path.rpartition('.')[2]}\b", lines[note.line - 1])


def test_what_is_left_is_what_was_there(write: Callable[[str], Path]) -> None:
    """Only the lines that are named change; the rest is the same, character by character and in order."""
    text = WRONG.read_text()
    kept = [
        line
        for line in run(text).text.splitlines()
        if not line.lstrip().startswith("# insitu migrate:") and not re.match(r" *# +\w+:", line)
    ]
    original = text.splitlines()
    position = 0
    rewritten = 0
    for line in kept:
        if line in original[position:]:
            position = original.index(line, position) + 1
        else:
            rewritten += 1
    assert rewritten == 6  # type, ip, target_model, and three lines in braces


def test_secrets_are_never_shown(write: Callable[[str], Path]) -> None:
    config = write(WRONG.read_text())
    for options in ([], ["--json"]):
        said = CliRunner().invoke(command, [str(config), "--force", *options])
        assert said.exit_code == 3
        for secret in SECRETS:
            assert secret in WRONG.read_text()
            assert secret not in said.output
    printed = CliRunner().invoke(command, [str(ADDITION), "-o", "-"], env=VARIABLES)
    assert "key-in-the-environment" not in printed.output


def test_the_command_writes_beside_the_file_and_says_how_it_went(write: Callable[[str], Path]) -> None:
    register_what_the_documents_name()
    config = write(ADDITION.read_text())
    said = CliRunner().invoke(command, [str(config)])
    target = config.with_name("config.insitu.yml")
    assert said.exit_code == 0, said.output
    assert f"insitu finetune --config_file={target} --dry-run" in said.output
    assert target.read_text() == run(ADDITION.read_text()).text
    assert CliRunner().invoke(command, [str(config)]).exit_code == 0, "the same again changes nothing"
    assert CliRunner().invoke(command, [str(target)]).exit_code == 0, "the new file is checked where it is"
    assert sorted(path.name for path in config.parent.iterdir()) == ["config.insitu.yml", "config.yml"]
    target.write_text("mine: 1\n")
    with pytest.raises(InsituError, match="the file exists and differs"):
        CliRunner().invoke(command, [str(config)], catch_exceptions=False)
    assert target.read_text() == "mine: 1\n"
    report = json.loads(CliRunner().invoke(command, [str(config), "--force", "--json"]).output)
    assert report["loads"] is True
    assert report["output"] == str(target)
    assert {"path": LEARNING_RATE, "line": 44, "value": "0.001"}.items() <= report["takes_effect"][0].items()


def test_line_ends_stay_as_they_were(tmp_path: Path) -> None:
    old, new = tmp_path / "old.yml", tmp_path / "new.yml"
    old.write_bytes(ADDITION.read_text().replace("\n", "\r\n").encode())
    CliRunner().invoke(command, [str(old), "-o", str(new)])
    assert new.read_bytes() == run(ADDITION.read_text()).text.replace("\n", "\r\n").encode()


def test_a_file_that_is_no_yaml_is_refused_with_the_line() -> None:
    with pytest.raises(InvalidRequest, match="line 3"):
        run("a: 1\nb: [\n")
    with pytest.raises(InvalidRequest, match="quotes"):
        run("llms: {p: {_type: openai, api_key: ${KEY}}}\n")


def test_no_entry_that_is_trained_is_found_before_a_run_starts(basic: str) -> None:
    text = basic.replace("test_adapter", "openpipe_art_trainer_adapter").replace(
        "port: 7623", "port: 7623, base_model: other"
    )
    (note,) = run(text).by_hand
    assert (note.path, note.yaml) == ("llms", 'model_name: "other"')


def test_a_config_that_is_insitus_already_loses_nothing() -> None:
    text = (Path(__file__).parents[3] / "examples" / "addition" / "config.yml").read_text()
    result = run(text)
    assert (result.text, result.left_out, result.by_hand) == (text, [], [])
