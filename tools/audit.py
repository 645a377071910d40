"""Compare the lock with known vulnerabilities, with pip-audit.

    python tools/audit.py            warn of a service that cannot be reached or does not know a package
    python tools/audit.py --strict   and fail

pip-audit itself reports "No known vulnerabilities found" for packages that it could not look up.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

LOCK = Path(__file__).resolve().parents[1] / "requirements" / "light.lock"
_SECONDS = 600
_UNREACHABLE = re.compile(r"connect|timed out|took longer|name resolution|retries", re.IGNORECASE)


def main() -> None:
    """Run pip-audit of this environment on the lock."""
    command = [sys.executable, "-m", "pip_audit", "--require-hashes", "--disable-pip", "--format", "json"]
    try:
        ran = subprocess.run(
            [*command, "-r", str(LOCK)], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        output, errors = ran.stdout, ran.stderr
    except subprocess.TimeoutExpired:
        output, errors = "", f"pip-audit took longer than {_SECONDS} s"
    lines, code = judged(output, errors, strict="--strict" in sys.argv[1:])
    print("\n".join(lines))
    sys.exit(code)


def judged(output: str, errors: str, *, strict: bool) -> tuple[list[str], int]:
    """Return what to print and the exit code: 1 for a vulnerability, 2 for what a strict check lacks."""
    try:
        packages = json.loads(output)["dependencies"]
    except (ValueError, KeyError):
        last = (errors.strip().splitlines() or ["no output"])[-1]
        if _UNREACHABLE.search(errors) is None:
            return [f"nothing was checked, pip-audit failed: {last[:300]}"], 2
        said = f"warning: nothing was checked, the service cannot be reached: {last[:300]}"
        return [said], 2 if strict else 0
    lines: list[str] = []
    for package in packages:
        for found in package.get("vulns", []):
            fixed = ", ".join(found.get("fix_versions", [])) or "no version"
            lines.append(f"{package['name']} {package['version']}: {found['id']}, fixed in {fixed}")
    num_found = len(lines)
    unknown = [package["name"] for package in packages if "skip_reason" in package]
    if unknown:
        lines.append(
            f"warning: {len(unknown)} of {len(packages)} packages could not be checked: {', '.join(unknown)}"
        )
    num_checked = len(packages) - len(unknown)
    lines.append(f"{num_checked} packages checked, {num_found} known vulnerabilities")
    return lines, 1 if num_found else 2 if strict and (unknown or not packages) else 0


if __name__ == "__main__":
    main()
