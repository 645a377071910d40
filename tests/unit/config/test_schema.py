"""The JSON schema of the configuration: complete, described, published, and true of the files that exist."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from jsonschema import Draft7Validator

from insitu.cli import cli
from insitu.config.load import load_config
from insitu.config.schema.document import json_schema, undescribed
from insitu.config.values.document import read_document
from insitu.errors import InsituError
from tests.support.original_documents import blocks, original_documents

ROOT = Path(__file__).resolve().parents[3]
PUBLISHED = ROOT / "docs" / "schema.json"
EXAMPLES = sorted([*ROOT.glob("examples/**/*.yml"), *ROOT.glob("src/insitu/**/*.yml")])
SHORT: dict[str, Any] = {"model": "tiny", "agent": "a:b", "data": "train.json", "reward": "exact_match"}


@pytest.fixture(scope="module")
def validator() -> Draft7Validator:
    schema = json_schema(built_in=True)
    Draft7Validator.check_schema(schema)
    return Draft7Validator(schema)


def test_every_field_is_described() -> None:
    assert undescribed() == []


def test_the_published_file_is_that_of_the_models() -> None:
    shown = CliRunner().invoke(cli, ["schema", "--built-in"])
    assert shown.output == PUBLISHED.read_text(), "insitu schema --built-in > docs/schema.json"


def test_the_examples_are_valid(validator: Draft7Validator) -> None:
    assert len(EXAMPLES) > 8
    for path in EXAMPLES:
        found = [error.message for error in validator.iter_errors(read_document(path.read_text(), str(path)))]
        assert not found, (path, found)


def problems(validator: Draft7Validator, document: dict[str, Any]) -> list[str]:
    return [".".join(map(str, error.absolute_path)) for error in validator.iter_errors(document)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": {"model": "tiny", "temperature": 1.0, "top_k": 5}},
        {"agent": {"entry": "a:b", "args": {"x": 1}}},
        {"agent": {"_type": "my_own", "anything": 1}},
        {"agent": "https://agent.example/run"},
        {"data": {"file_path": "train.csv", "structure": {"question": "q"}}},
        {"data": {"function": "a:rows", "file_path": "train.csv"}},
        {"reward": {"_type": "numeric", "tolerance": 0.1}},
        {"backend": {"port": "${PORT:-7623}", "name": "adder"}, "training": {"learning_rate": 1e-5}},
        {"backend": "127.0.0.1:9000", "num_generations": "${N}"},
        {"finetuning": {"num_epochs": 3, "ending_rewards": {"timeout": 0}}},
        {"trainers": {"epochs": None}},
        {"training": {"loss": "${LOSS:-dapo}"}},
    ],
)
def test_every_way_to_write_a_file_is_valid(validator: Draft7Validator, changes: dict[str, Any]) -> None:
    assert problems(validator, SHORT | changes) == []


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"modle": "tiny"}, ""),
        ({"model": {"temperature": 1.0}}, "model"),
        ({"agent": {"args": {}}}, "agent"),
        ({"agent": {"entry": "a:b", "arg": {}}}, "agent"),
        ({"data": {"file_path": "train.csv", "struct": {}}}, "data"),
        ({"reward": {"_type": "numeric", "tolerance": -1}}, "reward"),
        ({"training": {"learning_rate": 2}}, "training"),
        ({"backend": {"prot": 1}}, "backend"),
        ({"finetuning": {"num_epochs": 0}}, "finetuning.num_epochs"),
        ({"finetuning": {"num_epoch": 2}}, "finetuning"),
        ({"eval": {"evaluators": {"a": {"entry": "a:b"}}}}, "eval.evaluators.a"),
        ({"workflow": {"entry": "a:b"}}, "workflow"),
        ({"trainer_adapters": {"x": {"backend": {"port": "no"}}}}, "trainer_adapters.x.backend.port"),
    ],
)
def test_mistakes_are_found_at_their_place(
    validator: Draft7Validator, changes: dict[str, Any], place: str, tmp_path: Path
) -> None:
    assert place in problems(validator, SHORT | changes)
    file = tmp_path / "config.yml"
    file.write_text(yaml.safe_dump(SHORT | changes))
    with pytest.raises(InsituError):
        load_config(file)


def test_editors_show_what_a_setting_does() -> None:
    schema: Any = json.loads(PUBLISHED.read_text())
    definitions = schema["$defs"]
    assert schema["properties"]["agent"]["description"].startswith("The agent: `module:function`")
    assert "learning rate" in definitions["StepSettings"]["properties"]["learning_rate"]["description"]
    assert definitions["LLMConfig"]["properties"]["model"]["description"] == "The same as `model_name`."
    assert "default" not in definitions["BackendSettings"]["properties"]["api_key"]


def test_the_configurations_of_the_original_are_valid(validator: Draft7Validator) -> None:
    """Each document's blocks: the first is a whole file, the others are parts, valid on their own."""
    for document in original_documents():
        for block in blocks(document, "yaml"):
            found = [error.message for error in validator.iter_errors(read_document(block, "block"))]
            assert not found, (block, found)
