"""SIGTERM, by which service managers and containers stop a backend, ends it in order, as Ctrl-C does."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.backend import Backend


@pytest.mark.timeout(300)
async def test_sigterm_stops_a_backend_in_order(tmp_path: Path) -> None:
    backend = Backend(tmp_path / "state", ())  # no model: Ray, gateway and API
    backend.start()
    try:
        await backend.ready()
        assert backend.process is not None
        backend.process.send_signal(signal.SIGTERM)
        code = backend.process.wait(60)
    finally:
        backend.end()
    said = backend.output.read_text()
    assert code == 0, said
    assert "stopping: calls under way are finished" in said
    assert not backend.descendants()
