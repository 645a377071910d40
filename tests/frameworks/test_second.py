"""The agents of the second environment, in that environment, against a real backend of this one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.frameworks import environment
from tests.support.backend import Backend

pytestmark = pytest.mark.skipif(
    environment.python() is None, reason="the second environment is not built: run `make frameworks`"
)


@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_second_matrix(tmp_path: Path, real_backend: Backend) -> None:
    python = environment.python()
    assert python is not None
    addresses = {
        "INSITU_TEST_API_URL": real_backend.api_url,
        "INSITU_TEST_GATEWAY_URL": real_backend.gateway_url,
    }
    done = subprocess.run(
        [
            str(python),
            "-m",
            "pytest",
            "tests/frameworks/second_matrix.py",
            "-v",
            "--durations=0",
            "--tb=short",
            "--override-ini=addopts=-ra",  # that environment has plugins of its own, and no hypothesis
        ],
        cwd=environment.ROOT,
        env=environment.variables(tmp_path) | addresses,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    print(done.stdout[-20_000:], done.stderr[-5_000:])
    assert done.returncode == 0, "see what the second environment's pytest says above"
    assert "skipped" not in done.stdout.splitlines()[-1]
