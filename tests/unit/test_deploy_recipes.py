"""deploy/: the commands inside are insitu's, the files and extras exist, and both tools read the same model.

`make recipes` has the files checked by the tools that they are for.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from insitu.config.values.document import read_document
from tests.unit.test_docs_blocks import check_command, commands

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
SKY: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "sky.yaml").read_text())
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def example(folder: str, file: str) -> str:
    """Return the model that a configuration of an example names."""
    path = ROOT / "examples" / folder / file
    return read_document(path.read_text(), str(path))["model"]["model_name"]


def test_the_services_run_commands_that_exist() -> None:
    for name, service in COMPOSE["services"].items():
        check_command(service["command"])
        assert service["build"]["target"] in re.findall(r"^FROM \S+ AS (\w+)", DOCKERFILE, re.MULTILINE), name
        assert (ROOT / "deploy" / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


def test_the_client_trains_the_model_that_the_backend_serves() -> None:
    backend, client = COMPOSE["services"]["backend"], COMPOSE["services"]["client"]
    folder = client["working_dir"].removeprefix("/examples/")
    (file,) = [word.partition("=")[2] for word in client["command"] if word.startswith("--config_file=")]
    assert backend["command"][backend["command"].index("--model") + 1] == example(folder, file)
    assert client["network_mode"] == "service:backend", "plain HTTP is accepted on loopback only"
    assert client["environment"]["INSITU_API_KEY"] == backend["environment"]["INSITU_API_KEY"]


def test_the_ingress_passes_the_names_on_that_the_backend_allows() -> None:
    text = (ROOT / "deploy" / "kuberay.yaml").read_text()
    parts = {part["kind"]: part for part in yaml.safe_load_all(text)}
    rules = {rule["host"]: rule["http"]["paths"][0] for rule in parts["Ingress"]["spec"]["rules"]}
    (container,) = parts["RayCluster"]["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    (script,) = container["args"]
    (command,) = re.findall(r"insitu serve .*", script)
    assert re.findall(r"--allowed-host (\S+)", command) == list(rules)
    assert parts["Ingress"]["spec"]["tls"][0]["hosts"] == list(rules)
    ports = {port["name"] for port in parts["Service"]["spec"]["ports"]}
    assert {path["backend"]["service"]["port"]["name"] for path in rules.values()} == ports
    check_command(command.split()[1:])


def test_one_gpu_is_reserved() -> None:
    (device,) = COMPOSE["services"]["backend"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}


def test_every_volume_is_declared() -> None:
    used = {
        volume.partition(":")[0] for service in COMPOSE["services"].values() for volume in service["volumes"]
    }
    assert {name for name in used if "/" not in name} == set(COMPOSE["volumes"])


def test_the_images_install_extras_and_files_that_exist() -> None:
    for found in re.findall(r"\[([\w,-]+)\]", "".join(re.findall(r"^RUN pip .*", DOCKERFILE, re.MULTILINE))):
        assert set(found.split(",")) <= set(EXTRAS)
    for line in re.findall(r"^COPY (.*)", DOCKERFILE, re.MULTILINE):
        assert all((ROOT / name).exists() for name in line.split()[:-1]), line
    entries = re.findall(r"^ENTRYPOINT (.*)", DOCKERFILE, re.MULTILINE)
    assert entries == ['["insitu"]', '["insitu"]']


@pytest.mark.parametrize("part", ["setup", "run"])
def test_the_scripts_of_the_sky_task_parse_and_name_commands_that_exist(part: str) -> None:
    script = SKY[part]
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, timeout=30)
    assert checked.returncode == 0, checked.stderr
    found = list(commands(script))
    assert found
    for words in found:
        check_command(words)


def test_the_sky_task_trains_the_model_that_it_serves() -> None:
    served = re.search(r"insitu serve --model (\S+)", SKY["run"])
    trained = re.search(r"cd examples/(\w+)\n", SKY["run"])
    file = re.search(r"--config_file=(\S+)", SKY["run"])
    assert served
    assert trained
    assert file
    assert served[1] == example(trained[1], file[1])
    assert re.search(r"insitu export (\S+)", SKY["run"])[1] == trained[1]  # type: ignore[index]


def test_the_keys_of_the_task_are_those_of_skypilot() -> None:
    assert set(SKY) <= {"name", "resources", "workdir", "envs", "setup", "run", "num_nodes", "file_mounts"}
