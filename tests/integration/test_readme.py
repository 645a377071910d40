"""The README's own program runs as it stands, with only the ports and the model's name changed."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from insitu.testing.models import tiny
from tests.support.backend import running_backend

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.timeout(400)
async def test_readme_program_trains(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    arguments = ["--model", str(tiny()), "--model-name", "smollm2", "--max-seq-length", "256"]
    async with running_backend(tmp_path / "state", *arguments) as backend:
        own = program.replace("http://127.0.0.1:8000", backend.gateway_url)
        own = own.replace("http://127.0.0.1:7623", backend.api_url)
        script = tmp_path / "readme.py"
        script.write_text(own)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(sys.executable, str(script), stdout=pipe, stderr=pipe)
        out, err = await asyncio.wait_for(process.communicate(), 240)
    assert process.returncode == 0, err.decode()
    assert re.findall(r"^step (\d): reward -?[\d.]+$", out.decode(), re.MULTILINE) == ["1", "2", "3"]
