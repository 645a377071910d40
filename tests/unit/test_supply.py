"""The lock agrees with pyproject.toml and constraints.txt; bill of materials and audit with the lock."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name as canonical

from insitu.system.torch_builds.installing import TORCH_CPU_INDEX
from tools.audit import judged
from tools.lock import locked, version_of
from tools.lock_file import read_lock
from tools.sbom import LOCK, bill_of, check

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {package.name: package for package in read_lock(LOCK)}
WANTED = [
    Requirement(text)
    for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
]


def pins(path: str = "constraints.txt") -> dict[str, str]:
    lines = (ROOT / path).read_text().splitlines()
    pairs = (line.split("==") for line in lines if "==" in line)
    return {canonical(name): version for name, version in pairs}


# The lock


def test_the_lock_has_the_versions_of_the_constraints() -> None:
    pinned = pins()
    differ = {name: (one.version, pinned.get(name)) for name, one in PACKAGES.items()}
    assert {name: both for name, both in differ.items() if both[0] != both[1]} == {}, "make lock"


def test_the_lock_has_what_the_project_asks_for() -> None:
    for requirement in WANTED:
        locked_one = PACKAGES.get(canonical(requirement.name))
        assert locked_one is not None, f"{requirement} is not in the lock: make lock"
        assert requirement.specifier.contains(locked_one.version), f"{requirement}: make lock"
        assert "insitu" in locked_one.needed_by


@pytest.mark.parametrize("path", ["constraints-frameworks.txt", "tests/sinks/requirements-sinks.txt"])
def test_environments_in_which_nothing_is_resolved_have_what_the_project_asks_for(path: str) -> None:
    pinned = pins(path)
    missing = [each for each in WANTED if not each.specifier.contains(pinned.get(canonical(each.name), "0"))]
    assert missing == []


def test_the_backend_image_differs_from_what_is_tested_only_where_vllm_insists() -> None:
    image, tested = pins("requirements/backend.txt"), pins()
    differ = {name for name, version in image.items() if tested.get(name, version) != version}
    assert differ == {"apache-tvm-ffi"}, "vLLM's CUDA build asks for another version than its CPU build"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = [*WANTED, *map(Requirement, extras["backend"])]
    assert [
        each for each in wanted if not each.specifier.contains(image.get(canonical(each.name), "0"))
    ] == []


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.name
)
def test_actions_are_pinned_by_digest(path: Path) -> None:
    used = re.findall(r"uses: *(.*)", path.read_text())
    assert used
    assert [each for each in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}  # v[\d.]+", each)] == []


@pytest.mark.parametrize(
    "path", [".github/workflows/release.yml", ".github/workflows/ci.yml", "deploy/Dockerfile"]
)
def test_nothing_is_installed_in_a_version_of_its_own_choice(path: str) -> None:
    installs = re.findall(r"pip install (.*)", (ROOT / path).read_text().replace("\\\n", " "))
    fixed = re.compile(r"--constraint|--require-hashes|[\w-]+==[\d.]+$")
    assert [each for each in installs if not fixed.search(each)] == []
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert all("==" in each for each in requires)


def test_every_package_has_hashes_and_is_needed_by_another() -> None:
    asked = {canonical(requirement.name) for requirement in WANTED}
    for package in PACKAGES.values():
        assert package.sha256, package.name
        assert len(set(package.sha256)) == len(package.sha256)
        assert package.needed_by, package.name
        assert set(package.needed_by) <= {*PACKAGES, "insitu"}
        assert ("insitu" in package.needed_by) == (package.name in asked), f"{package.name}: make lock"


@pytest.mark.parametrize("path", ["requirements/light.lock", "constraints.txt", "Makefile", "pyproject.toml"])
def test_no_file_names_an_index(path: str) -> None:
    """pip's default is PyPI; another index in a committed file would be trusted by everybody."""
    text = (ROOT / path).read_text()
    if path == "Makefile":  # PyPI has no CPU build of torch, so `make setup` may ask PyTorch's own index
        assert text.count(f"CPU_INDEX := {TORCH_CPU_INDEX}\n") == 1
        text = text.replace("--extra-index-url $(CPU_INDEX)", "")
    assert not re.search(r"--(extra-)?index-url|--find-links|://(?!github\.com|pypi\.org)\S*simple", text)
    if path.startswith("requirements"):
        assert "://" not in text


def test_a_lock_of_something_else_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "x.lock").write_text("--index-url https://example.org/simple\n")
    with pytest.raises(ValueError, match="line 1"):
        read_lock(tmp_path / "x.lock")


def test_a_lock_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = [
        {"name": "Big_One", "version": "1.0", "requires_dist": ["small>=1", "none; extra == 'x'"]},
        {"name": "small", "version": "2.0"},
    ]
    hashes = {"big-one": ["b" * 64, "a" * 64], "small": ["c" * 64]}
    (tmp_path / "x.lock").write_text(locked(["big-one>=1"], found, hashes))
    big, small = read_lock(tmp_path / "x.lock")
    assert (big.name, big.version, big.sha256) == ("big-one", "1.0", ["a" * 64, "b" * 64])
    assert (big.needed_by, small.needed_by) == (["insitu"], ["big-one"])


def test_versions_are_told_by_the_names_of_files() -> None:
    assert version_of("yarl-1.25.1-cp311-cp311-macosx_11_0_arm64.whl") == "1.25.1"
    assert version_of("python_dateutil-4.0.0.tar.gz") == "4.0.0"
    assert version_of("something-1.0.exe") is None


# The bill of materials


def test_the_bill_lists_every_package_of_the_lock_with_its_hashes() -> None:
    bill = bill_of(LOCK)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    listed: dict[str, dict[str, Any]] = {one["name"]: one for one in bill["components"]}
    assert listed.keys() == PACKAGES.keys()
    for name, one in listed.items():
        assert one["purl"] == f"pkg:pypi/{name}@{PACKAGES[name].version}"
        (files,) = one["externalReferences"]
        assert [entry["content"] for entry in files["hashes"]] == PACKAGES[name].sha256


def test_the_bill_has_the_dependencies_and_is_the_same_every_time() -> None:
    bill = bill_of(LOCK)
    needs = {entry["ref"]: entry["dependsOn"] for entry in bill["dependencies"]}
    root = bill["metadata"]["component"]["bom-ref"]
    assert len(needs[root]) == len(WANTED)
    refs = {one["bom-ref"] for one in bill["components"]}
    assert needs.keys() == refs | {root}
    assert {ref for others in needs.values() for ref in others} == refs
    assert json.dumps(bill_of(LOCK)) == json.dumps(bill)


def test_the_bill_is_valid() -> None:
    pytest.importorskip("cyclonedx", reason="`make sbom` checks it")
    assert check(json.dumps(bill_of(LOCK))) == "valid CycloneDX 1.6"
    with pytest.raises(SystemExit, match=r"not CycloneDX 1\.6"):
        check(json.dumps({**bill_of(LOCK), "extra": 1}))


# The audit

CLEAN = {"name": "good", "version": "1.0", "vulns": []}
BAD = {"name": "bad", "version": "1.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["1.1"]}]}
UNKNOWN = {"name": "odd", "skip_reason": "Dependency not found on PyPI"}


@pytest.mark.parametrize(
    ("packages", "code", "strict_code", "said"),
    [
        ([CLEAN], 0, 0, "1 packages checked, 0 known vulnerabilities"),
        ([CLEAN, BAD], 1, 1, "bad 1.0: PYSEC-1, fixed in 1.1"),
        ([CLEAN, UNKNOWN], 0, 2, "warning: 1 of 2 packages could not be checked: odd"),
        ([BAD, UNKNOWN], 1, 1, "PYSEC-1"),
        ([UNKNOWN], 0, 2, "0 packages checked"),
    ],
)
def test_findings_fail_and_what_was_not_checked_is_said(
    packages: list[dict[str, Any]], code: int, strict_code: int, said: str
) -> None:
    output = json.dumps({"dependencies": packages, "fixes": []})
    lines, found = judged(output, "", strict=False)
    assert (found, judged(output, "", strict=True)[1]) == (code, strict_code)
    assert said in "\n".join(lines)


def test_a_service_that_cannot_be_reached_is_a_warning() -> None:
    lines, code = judged("", "Traceback\nConnectionError: no route", strict=False)
    assert code == 0
    assert lines == ["warning: nothing was checked, the service cannot be reached: ConnectionError: no route"]
    assert judged("", "ConnectionError", strict=True)[1] == 2


@pytest.mark.parametrize(
    "errors", ["ERROR:pip_audit: the lock has no hashes", "No module named pip_audit", ""]
)
def test_any_other_failure_fails(errors: str) -> None:
    lines, code = judged("", errors, strict=False)
    assert code == 2
    assert "pip-audit failed" in lines[0]
