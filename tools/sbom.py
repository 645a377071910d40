"""Write a bill of materials in CycloneDX 1.6 JSON, made from the lock alone.

    python tools/sbom.py dist/insitu-light.cdx.json

The same lock gives the same bytes. It is checked against CycloneDX's schema where `cyclonedx-python-lib` is
installed, as in `make sbom`.
"""

from __future__ import annotations

import json
import sys
import tomllib
import uuid
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.lock_file import LockedPackage, read_lock

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements" / "light.lock"


def main() -> None:
    """Write the file and check it."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python tools/sbom.py FILE")
    target = Path(sys.argv[1])
    text = json.dumps(bill_of(LOCK), indent=2) + "\n"
    checked = check(text)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    print(f"{target}: {checked}")


def bill_of(lock: Path) -> dict[str, Any]:
    """Return the bill of materials of a lock."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = read_lock(lock)
    root = purl(project["name"], project["version"])
    refs = {"insitu": root} | {one.name: purl(one.name, one.version) for one in packages}
    needs: dict[str, list[str]] = {ref: [] for ref in refs.values()}
    for one in packages:
        for user in one.needed_by:
            needs[refs[user]].append(refs[one.name])
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, root + lock.read_text())}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": root,
                "name": project["name"],
                "version": project["version"],
                "purl": root,
                "licenses": [{"license": {"id": project["license"]}}],
            }
        },
        "components": [component(one) for one in packages],
        "dependencies": [{"ref": ref, "dependsOn": sorted(others)} for ref, others in sorted(needs.items())],
    }


def component(package: LockedPackage) -> dict[str, Any]:
    """Return a package; its hashes are those of the files that may be installed."""
    where = f"https://pypi.org/project/{package.name}/{package.version}/"
    hashes = [{"alg": "SHA-256", "content": one} for one in package.sha256]
    ref = purl(package.name, package.version)
    return {
        "type": "library",
        "bom-ref": ref,
        "name": package.name,
        "version": package.version,
        "purl": ref,
        "externalReferences": [{"type": "distribution", "url": where, "hashes": hashes}],
    }


def purl(name: str, version: str) -> str:
    """Return the package's URL, https://github.com/package-url."""
    return f"pkg:pypi/{name}@{version.replace('+', '%2B')}"


def check(text: str) -> str:
    """Check the text against the schema; return what was done, raise SystemExit with what is wrong."""
    if find_spec("cyclonedx") is None:
        return "not checked against the schema, cyclonedx-python-lib is not installed"
    from cyclonedx.schema import SchemaVersion  # pyright: ignore[reportMissingImports]
    from cyclonedx.validation.json import JsonStrictValidator  # pyright: ignore[reportMissingImports]

    wrong = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if wrong is not None:
        raise SystemExit(f"the bill of materials is not CycloneDX 1.6: {wrong}")
    return "valid CycloneDX 1.6"


if __name__ == "__main__":
    main()
