"""Every snippet of the original harness's documents is accepted: its YAML, and its command lines."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from insitu import plugins
from insitu.cli.finetune import finetune
from insitu.config import Config, load_config, parse_config, to_yaml
from insitu.plugins import ComponentConfig, Kind
from tests.support.original_documents import blocks, original_documents


class MyWorkflowConfig(ComponentConfig):
    llm: str


@pytest.fixture(autouse=True)
def my_components(components: None) -> None:
    """What the documents take for granted: the reader's own workflow and evaluator."""
    plugins.register(Kind.WORKFLOW, "my_workflow", MyWorkflowConfig)(lambda config, parts: None)
    plugins.register(Kind.EVALUATOR, "my_custom_evaluator")(lambda config, parts: None)


def merged(base: Any, change: Any) -> Any:
    if isinstance(base, dict) and isinstance(change, dict):
        return base | {key: merged(base.get(key), value) for key, value in change.items()}
    return change


def configurations() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each YAML block as (its own text, the whole configuration that it stands for).

    The first block of a document is a whole file; the others are parts to be put over it.
    """
    for document in original_documents():
        basic: dict[str, Any] = {}
        for block in blocks(document, "yaml"):
            part = yaml.safe_load(block)
            basic = basic or part
            yield block, merged(basic, part)


def commands() -> list[list[str]]:
    """The arguments of every `nat finetune`, continued lines joined."""
    lines = [
        line
        for document in original_documents()
        for block in blocks(document, "bash")
        for line in block.replace("\\\n", " ").splitlines()
    ]
    split = [shlex.split(line, comments=True) for line in lines]
    return [words[2:] for words in split if words[:2] == ["nat", "finetune"]]


def test_nothing_is_overlooked() -> None:
    text = "\n".join(original_documents())
    assert len(list(configurations())) == len(re.findall(r"^ *```yaml$", text, re.MULTILINE)) >= 8
    assert len(commands()) == len(re.findall(r"^ *nat finetune ", text, re.MULTILINE)) >= 3


def test_every_yaml_block_is_accepted() -> None:
    for block, whole in configurations():
        config = parse_config(whole, where=block)
        assert config.finetuning.enabled


def test_the_whole_file_loads_and_means_what_it_says(write: Callable[[str], Path]) -> None:
    block, _ = next(configurations())
    config = load_config(write(block)).config
    assert config.llms["training_llm"].options == {"temperature": 0.4}
    assert config.eval.general.max_concurrency == 16
    assert config.finetuning.num_epochs == 20
    assert config.finetuning.output_dir == Path(".tmp/nat/finetuning/output")
    adapter: Any = config.trainer_adapters["art_adapter"]
    assert (adapter.backend.port, adapter.training.learning_rate) == (7623, 1e-6)
    builder: Any = config.trajectory_builders["art_builder"]
    assert builder.num_generations == 2


def test_no_value_of_a_block_is_lost() -> None:
    """Every value that a block writes stands in the configuration that comes of it."""
    for _, whole in configurations():
        config = parse_config(whole)
        for path, written in leaves(whole):
            assert str(value_at(config, path)) == str(plain(written)), path


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield from leaves(inner, (*path, key))
    if not isinstance(value, dict | list):
        yield path, value


def value_at(config: Config, path: tuple[Any, ...]) -> Any:
    value: Any = config
    for key in path:
        name = "type_name" if key == "_type" else key
        value = value[key] if isinstance(value, dict | list) else getattr(value, name)
    return value.get_secret_value() if hasattr(value, "get_secret_value") else value


def plain(written: Any) -> Any:
    return float(written) if isinstance(written, str) and re.fullmatch(r"\d+e-\d+", written) else written


def test_every_command_line_is_accepted(write: Callable[[str], Path]) -> None:
    _, basic = next(configurations())
    path = write(to_yaml(basic))
    for arguments in commands():
        given = finetune.make_context("finetune", list(arguments)).params
        assert given["config_file"] == Path("configs/finetune.yml")
        config = load_config(path, given["override"]).config
        if "-o" in arguments:
            assert config.finetuning.num_epochs == 50
        if any(each.startswith("--validation") for each in arguments):
            assert (given["validation_dataset"], given["validation_interval"]) == ("data/val.json", 5)
