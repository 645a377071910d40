"""The examples' configurations: they fit the schema, they load, their data is what the generator writes, and
both run in front of a stand-in backend."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner

from examples.tictactoe import rules
from examples.tools.shop import ITEMS
from insitu.cli import cli
from insitu.config.load import load_config
from insitu.config.values.document import read_document
from insitu.harness.interfaces.settings import AdapterConfig
from tests.support.known_models import CONFIGS
from tests.support.standin_backend import StandinBackend
from tests.support.standin_engine import Behaviour
from tests.support.standin_tools import StandinToolEngine

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ("deduction", "tictactoe", "tools")
FILES = [f"{name}/{file}" for name in EXAMPLES for file in ("config.yaml", "config-gpu.yaml")]
SCHEMA = json.loads((ROOT / "docs" / "schema.json").read_text())
QUIET = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}


def path_of(file: str) -> Path:
    return ROOT / "examples" / file


@pytest.mark.parametrize("file", FILES)
def test_it_fits_the_schema_and_loads(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = path_of(file)
    text = path.read_text()
    monkeypatch.chdir(path.parent)
    modeline = re.match(r"# yaml-language-server: \$schema=(\S+)\n", text)
    assert modeline
    assert (path.parent / modeline[1]).resolve() == ROOT / "docs" / "schema.json"
    document = read_document(text, file)
    jsonschema.validate(document, SCHEMA)
    config = load_config(path.name).config
    adapter = config.trainer_adapters["backend"]
    assert isinstance(adapter, AdapterConfig)
    assert adapter.backend.name == path.parent.name
    for key in ("data", "validation"):
        assert (path.parent / document[key]).is_file()
    assert f"--config_file={path.name}\n" in text


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_data_is_what_the_generator_writes(name: str, tmp_path: Path) -> None:
    unwanted = shutil.ignore_patterns("*.jsonl", "output*")
    copy = shutil.copytree(path_of(name), tmp_path / name, ignore=unwanted)
    (copy / "data").mkdir(exist_ok=True)
    subprocess.run([sys.executable, "generate.py"], cwd=copy, check=True, timeout=60, env=QUIET)
    written = {path.name: path.read_bytes() for path in (copy / "data").iterdir()}
    assert written == {path.name: path.read_bytes() for path in (path_of(name) / "data").iterdir()}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_model_fits_the_card_that_the_file_names(name: str, tmp_path: Path) -> None:
    """`insitu plan` with the model's own config.json, and the settings of the README's `insitu serve`."""
    text = path_of(f"{name}/config-gpu.yaml").read_text()
    model = re.search(r"model_name: Qwen/(\S+)-Instruct", text)
    card = re.search(r"one GPU of (\d+) GB", text)
    served = re.search(r"insitu serve --model Qwen/\S+ (--max-seq-length \d+)", readme(name))
    assert model
    assert card
    assert served
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[model[1].lower()]))
    asked = ["--device", "cuda", "--device-memory", f"{card[1]}GB", "--num-devices", "1"]
    asked += ["--host-memory", "64GiB"]
    shown = CliRunner().invoke(cli, ["plan", "--model", str(tmp_path), *asked, *served[1].split()])
    assert shown.exit_code == 0, shown.output


def readme(name: str) -> str:
    return path_of(f"{name}/README.md").read_text()


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_readme_names_every_file_and_says_what_was_not_run(name: str) -> None:
    text = readme(name)
    ours = [path.name for path in path_of(name).iterdir() if path.suffix in (".py", ".yaml", ".ipynb")]
    assert not [file for file in ours if f"`{file}`" not in text]
    assert "has not been run on a GPU" in text


# In front of a stand-in backend


def free_square(messages: list[dict[str, str]]) -> str:
    return messages[-1]["content"].partition("Free: ")[2].split()[0]


def some_answer(messages: list[dict[str, str]]) -> str:
    hour = "8" if "Who was" in messages[-1]["content"] else "attic, 8"
    return f"Let me think.\nAnswer: Ada, {hour}"


def clerk(messages: list[dict[str, str]]) -> str:
    """Look up what the last question is about, then repeat the tool's answer."""
    last = messages[-1]
    if last["role"] == "tool":
        return last["content"]
    item = next(item for item in ITEMS if re.search(rf"\b{item}\b", last["content"]))
    tool = "stock" if "in stock" in last["content"] else "price"
    return f'<call>{{"name": "{tool}", "arguments": {{"item": "{item}"}}}}</call>'


PLAYERS = {"deduction": some_answer, "tictactoe": free_square, "tools": clerk}


def standin(name: str, model: str, state: Path) -> StandinBackend:
    backend = StandinBackend(state)
    behaviour = Behaviour(models=[model], answers=PLAYERS[name])
    kind = StandinToolEngine if name == "tools" else type(backend.engine)
    backend.engine = kind(behaviour)
    return backend


async def command(folder: Path, *arguments: str) -> str:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "insitu.cli", *arguments, cwd=folder, stdout=pipe, stderr=pipe, env=QUIET
    )
    out, said = await asyncio.wait_for(process.communicate(), 100)
    assert process.returncode == 0, (out + said).decode()
    return out.decode()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("file", FILES)
async def test_it_is_checked_and_tried(file: str, tmp_path: Path) -> None:
    path = path_of(file)
    name, model = path.parent.name, read_document(path.read_text(), file)["model"]["model_name"]
    async with standin(name, model, tmp_path / "state") as backend:
        # The stand-in writes one token a character.
        here = ["-o", "backend.port", str(backend.port), "-o", "model.max_tokens", "200"]
        out = ["-o", "finetuning.output_dir", str(tmp_path / "out")]
        checked, tried = await asyncio.gather(
            command(path.parent, "finetune", f"--config_file={path.name}", "--dry-run", *here, *out),
            command(path.parent, "try", path.name, "--json", *here),
        )
    assert "FAILED" not in checked
    found: dict[str, Any] = json.loads(tried)
    assert (found["ok"], found["recorded"], found["model"]) == (True, True, model)
    for each in found["examples"]:
        assert each["error"] is None
        assert each["reward"] is not None
        assert each["num_calls"] >= {"deduction": 1, "tictactoe": 2, "tools": 2}[name]
        if name == "deduction":
            assert each["reward_check"]["told_apart"] is True
        if file == "tools/config.yaml":
            assert each["reward"] == 1.0


def test_the_stand_in_plays_by_the_rules() -> None:
    assert free_square([{"role": "user", "content": rules.shown([5], [1])}]) == "2"
