"""The supervisor tells a run nothing about runs of other projects; stored names are safe paths."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from insitu.backend.ledger import Ledger, ledger_url
from insitu.backend.ledger.checkpoint_files import run_directory
from insitu.backend.serving.registration import Registrar
from insitu.backend.serving.version_leases import VersionLeases, _Lent
from insitu.errors import CannotHonour, InvalidRequest
from insitu.types import LoraSettings, StepSettings, Trajectory, TrajectoryGroup

OTHERS = "a run of another project"
MERGED: Any = SimpleNamespace(publication="merged")


@pytest.mark.parametrize(("other", "named"), [("a~other", True), ("b~other", False), ("other", False)])
async def test_what_a_job_a_lease_and_a_registration_wait_for(
    tmp_path: Path, other: str, named: bool
) -> None:
    with Ledger(ledger_url(tmp_path)) as ledger:
        for name in ("a~run", other):
            ledger.register_run("p", name, "model", LoraSettings(), {}, {})
            ledger.put_group(TrajectoryGroup("g", name, [Trajectory("r", ["c"], 1.0)]), "h")
        its = ledger.create_job(other, "k", ["g"], StepSettings(), "h")
        job = ledger.create_job("a~run", "k", ["g"], StepSettings(), "h")
        lent: Any = SimpleNamespace(
            run="a~run", model=f"{other}@0", seconds=9.0, created_at=its.created_at + 1
        )
        traffic: Any = SimpleNamespace(runs={other: {}})
        leases = VersionLeases(MERGED, ledger, traffic)
        said = [leases._goes_first(lent, its)]
        leases._open = [lent]
        leases._lent[other, 0] = _Lent(other, 0, SimpleNamespace(), AsyncExitStack())  # type: ignore[arg-type]
        await leases.say_waiting(job)
        said += [ledger.get_job(job.id).phase, leases._goes_first(lent, None)]
        registrar = Registrar(MERGED, ledger, traffic, None, tmp_path, print)  # type: ignore[arg-type]
        with pytest.raises(CannotHonour) as refused:
            registrar._wanted_engine(ledger.get_run("a~run"))
        said.append(str(refused.value))
    for text in said:
        assert text is not None
        assert (OTHERS not in text) == named, text
        assert (other in text.replace(OTHERS, "")) == named, text


def test_a_stored_name_is_one_part_of_a_path(tmp_path: Path) -> None:
    assert run_directory(tmp_path, "a~run") == tmp_path / "a~run"
    for odd in ("~", "~run", "a~", "a~b~c", "a~../b", "../a~b", "a~/b"):
        with pytest.raises(InvalidRequest):
            run_directory(tmp_path, odd)
