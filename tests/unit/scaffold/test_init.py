"""`insitu init`: a whole project for each framework, or nothing at all."""

from __future__ import annotations

import ast
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from jsonschema import Draft7Validator

from insitu.cli import cli
from insitu.config.load import load_config
from insitu.config.values.document import read_document
from insitu.errors import Conflict, InvalidRequest
from insitu.harness.interfaces.settings import AdapterConfig
from insitu.scaffold import framework as frameworks
from insitu.scaffold import project as module
from insitu.scaffold.framework import FRAMEWORKS
from insitu.scaffold.project import Project

FILES = [
    ".env.example",
    "README.md",
    "agent.py",
    "config.yml",
    "data/train.jsonl",
    "data/validation.jsonl",
    "reward.py",
    "schema.json",
    "test_agent.py",
]
OWN = {"README.md", "agent.py", "config.yml"}
"""Files that differ from project to project."""


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    """Made once: it takes longer than all the rest."""
    from insitu.config.schema.document import json_schema

    return json_schema()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schema: dict[str, Any]) -> Path:
    monkeypatch.setattr(module, "json_schema", lambda: schema)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def init(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["init", *arguments])


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_project_is_written_for_every_framework(place: Path, framework: str) -> None:
    shown = init("shop", "--framework", framework)
    assert shown.exit_code == 0, shown.output
    folder = place / "shop"
    written = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    assert sorted(written) == FILES
    assert [line.strip() for line in shown.output.splitlines() if line.startswith("  shop/")] == [
        f"shop/{name}" for name in FILES
    ]
    (run,) = [
        node
        for node in ast.parse((folder / "agent.py").read_text()).body
        if isinstance(node, ast.AsyncFunctionDef) and node.name == "run"
    ]
    assert [argument.arg for argument in run.args.args] == ["question", "context"][: len(run.args.args)]
    assert run.args.args
    readme = (folder / "README.md").read_text()
    assert FRAMEWORKS[framework].install_command in readme
    for text in (readme, (folder / "config.yml").read_text()):
        assert not [word for word in ("project-name", "-command\n", "framework-name") if word in text]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_configuration_loads_and_its_schema_accepts_it(place: Path, framework: str) -> None:
    Project("shop", framework).write()
    path = place / "shop" / "config.yml"
    config = load_config(path).config
    assert config.finetuning.enabled
    adapter = config.trainer_adapters["backend"]
    assert isinstance(adapter, AdapterConfig)
    assert (adapter.backend.name, adapter.backend.base_model) == ("shop", "smollm2")
    first, *content = path.read_text().splitlines()
    assert len(content) <= 12
    modeline, _, file = first.partition("$schema=")
    assert modeline == "# yaml-language-server: "
    validator = Draft7Validator(json.loads((path.parent / file).read_text()))
    document = read_document(path.read_text(), str(path))
    assert not [error.message for error in validator.iter_errors(document)]
    assert list(validator.iter_errors({**document, "modle": 1})), "the schema checks something"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_projects_differ_in_their_agent_alone(place: Path, framework: str) -> None:
    Project("one", "openai").write()
    Project("two", framework).write()
    for name in set(FILES) - OWN:
        assert (place / "one" / name).read_bytes() == (place / "two" / name).read_bytes(), name


def test_its_own_tests_pass_without_a_backend(place: Path) -> None:
    Project("shop", "openai").write()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    quick = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(Path(module.__file__).parents[2])}
    done = subprocess.run(
        command, cwd=place / "shop", capture_output=True, text=True, check=False, env=quick, timeout=60
    )
    assert done.returncode == 0, done.stdout
    assert "9 passed" in done.stdout
    (place / "shop" / "reward.py").write_text("def reward(item):\n    return 1.0\n")
    done = subprocess.run(
        command, cwd=place / "shop", capture_output=True, check=False, env=quick, timeout=60
    )
    assert done.returncode == 1, "its tests can fail"


def test_held_out_orders_are_not_trained_on(place: Path) -> None:
    Project("shop", "openai").write()
    train, held_out = (rows(place / "shop" / "data" / f"{name}.jsonl") for name in ("train", "validation"))
    assert (len(train), len(held_out)) == (24, 12)
    for key in ("id", "question"):
        assert len({row[key] for row in train + held_out}) == 36, key


@pytest.mark.parametrize(
    "name", ["../shop", "a/b", "/tmp/shop", "..", ".", ".shop", "a b", "Shop", "", "x" * 65]
)
def test_a_name_that_is_not_plain_is_rejected(place: Path, name: str) -> None:
    shown = init(name)
    assert shown.exit_code == 1
    assert isinstance(shown.exception, InvalidRequest)
    hint = shlex.split(shown.exception.hint)
    assert hint[:2] == ["insitu", "init"]
    assert not list(place.iterdir())
    assert init(*hint[2:]).exit_code == 0, "the name it proposes is one"


def test_an_unknown_framework_is_rejected(place: Path) -> None:
    shown = init("shop", "--framework", "langgraf")
    assert shown.exit_code == 2
    assert "'openai', 'langgraph', 'openai-agents', 'llamaindex', 'adk'" in shown.output
    assert not list(place.iterdir())


def test_a_place_that_is_taken_is_left_alone(place: Path) -> None:
    (place / "file").write_text("mine")
    (place / "full").mkdir()
    (place / "full" / "thesis.tex").write_text("years of work")
    (place / "link").symlink_to(place / "elsewhere")
    for name, reason in (("file", "not a directory"), ("full", "not empty"), ("link", "not a directory")):
        shown = init(name)
        assert isinstance(shown.exception, Conflict)
        assert reason in str(shown.exception)
    assert sorted(path.name for path in place.rglob("*")) == ["file", "full", "link", "thesis.tex"]
    (place / "empty").mkdir()
    assert init("empty").exit_code == 0
    assert isinstance(init("empty").exception, Conflict), "a second time it is not empty"


def test_a_place_that_cannot_be_written_is_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    shown = init("shop")
    assert isinstance(shown.exception, InvalidRequest)
    assert f"{place / 'shop'} cannot be written: " in str(shown.exception)
    assert "No space left" in str(shown.exception)
    assert not list(place.iterdir()), "nothing is left of it"


def test_a_name_that_looks_like_a_placeholder_stays_as_it_is(place: Path) -> None:
    for name in ("install-command", "project-name"):
        assert init(name).exit_code == 0
        assert (place / name / "README.md").read_text().startswith(f"# {name}\n")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_missing_framework_is_named_with_the_command(
    place: Path, monkeypatch: pytest.MonkeyPatch, framework: str
) -> None:
    monkeypatch.setattr(frameworks, "_is_installed", lambda _: True)
    assert "pip install" not in init("there", "--framework", framework).output
    absent = FRAMEWORKS[framework].distributions[-1]
    monkeypatch.setattr(frameworks, "_is_installed", lambda name: name != absent)
    shown = init("shop", "--framework", framework)
    assert shown.exit_code == 0
    assert f"Not installed: {absent}." in shown.output
    command = next(line.strip() for line in shown.output.splitlines() if "pip install" in line)
    assert command == FRAMEWORKS[framework].install_command
    assert (place / "shop" / "agent.py").exists()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_install_command_names_extras_that_exist(framework: str) -> None:
    import tomllib

    text = (Path(__file__).resolve().parents[3] / "pyproject.toml").read_text()
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    brought = [each for each in FRAMEWORKS[framework].requirements if "[" not in each]
    for requirement in FRAMEWORKS[framework].requirements:
        name, _, extra = requirement.rstrip("]").partition("[")
        if name == "insitu":
            brought += [each.partition(">")[0] for each in extras[extra]]
    assert set(FRAMEWORKS[framework].distributions) == set(brought)


def printed_commands(text: str) -> list[list[str]]:
    """The commands of insitu in a text, one per line."""
    lines = [shlex.split(line) for line in text.splitlines() if " --" in line or line.endswith("config.yml")]
    return [words for words in lines if Path(words[0]).name == "insitu"]


def test_the_next_commands_are_those_of_the_command_line(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = init("shop").output
    assert shown.count("  cd shop\n") == 2
    monkeypatch.chdir(place / "shop")
    for text in (shown, Path("README.md").read_text()):
        commands = printed_commands(text)
        given: dict[str, dict[str, Any]] = {}
        for _, name, *arguments in commands:
            command = cli.get_command(None, name)  # pyright: ignore[reportArgumentType]
            assert command is not None
            given[name] = command.make_context(name, arguments).params
        assert list(given) == ["serve", "try", "finetune"]
        served = load_config(given["try"]["config"]).config.llms["policy"].model_name
        assert given["serve"]["model_name"] == served
        assert given["serve"]["model"].endswith("-m insitu.testing.models smollm2)")
        assert load_config(given["finetune"]["config_file"]).config.finetuning.num_epochs > 1


def test_programs_are_called_by_path_where_their_name_means_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = tmp_path / "my env" / "bin", tmp_path / "other"
    for folder in (own, other):
        folder.mkdir(parents=True)
        for name in ("insitu", "python"):
            (folder / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(own / "python"))
    monkeypatch.setenv("PATH", str(other))
    words = shlex.split(Project("shop", "openai").commands()[1])
    assert words == [str(own / "insitu"), "try", "config.yml"]
    monkeypatch.setenv("PATH", str(own))
    assert Project("shop", "openai").commands()[1] == "insitu try config.yml"


def test_json_says_the_same(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frameworks, "_is_installed", lambda _: False)
    found = json.loads(init("shop", "--framework", "adk", "--json").output)
    assert found == {
        "directory": str(place / "shop"),
        "framework": "adk",
        "files": FILES,
        "missing": ["google-adk", "anthropic"],
        "install": "pip install 'insitu[google-adk]'",
        "commands": Project("shop", "adk").commands(),
    }
