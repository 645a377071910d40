"""Run pytest on two halves of some folders at once: two cores need little more than half the time.

    python -m tests.support.halves tests/unit/gateway -q

A single file, or anything else than files and folders (`file::test`, `-k name`), is left to pytest as it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

_NOTHING_SELECTED = 5


def test_files(places: list[str]) -> list[Path]:
    """The test files of all places, largest first."""
    found = {
        file
        for place in map(Path, places)
        for file in (place.rglob("test_*.py") if place.is_dir() else [place])
    }
    return sorted(found, key=lambda file: (-file.stat().st_size, file))


def halves(files: list[Path]) -> list[list[str]]:
    """Two lists of about the same size: each file joins the smaller one."""
    made: list[list[str]] = [[], []]
    sizes = [0, 0]
    for file in files:
        smaller = sizes.index(min(sizes))
        made[smaller].append(str(file))
        sizes[smaller] += file.stat().st_size
    return [sorted(half) for half in made]


def main(arguments: list[str]) -> int:
    pytest = [sys.executable, "-m", "pytest"]
    options = [argument for argument in arguments if argument.startswith("-")]
    places = [argument for argument in arguments if not argument.startswith("-")]
    files = test_files(places) if all(Path(place).exists() for place in places) else []
    if len(files) < 2 or (os.cpu_count() or 1) < 2:
        return subprocess.call([*pytest, *arguments])
    first, second = halves(files)
    # Both would write what failed last.
    pytest += ["-p", "no:cacheprovider", *options]
    with tempfile.TemporaryFile("w+") as out:
        beside = subprocess.Popen([*pytest, *second], stdout=out, stderr=subprocess.STDOUT)
        try:
            codes = [subprocess.call([*pytest, *first]), beside.wait()]
        finally:
            beside.kill()
            beside.wait()
        out.seek(0)
        print(out.read(), end="")
    ran = [code for code in codes if code != _NOTHING_SELECTED]
    return max(ran, default=_NOTHING_SELECTED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
