"""Directories that travel to an actor on another node."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

pytest.importorskip("ray", reason="nodes are Ray's")

from insitu.backend.fleet import node as node_module
from insitu.backend.fleet.node import Node, Parcels, digest_of, interface_of, read_files, write_files
from insitu.errors import CorruptCheckpoint

FILES = {"adapter/config.json": b"{}", "state.json": b"1"}


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    """An actor on the node b of a supervisor on the node a."""
    monkeypatch.setattr(node_module, "this_node", lambda: "b")
    monkeypatch.setattr(node_module.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    return Node("a", tmp_path / "logs" / "replica-0.log")


def test_a_directory_arrives_as_it_was(tmp_path: Path, away: Node) -> None:
    write_files(FILES, tmp_path / "sent")
    files = read_files(tmp_path / "sent")
    assert files == FILES
    path = Path(away.keep(digest_of(files), files))
    assert read_files(path) == FILES
    assert not list(path.parent.glob("*.part"))


def test_a_content_is_written_once(away: Node) -> None:
    path = Path(away.keep(digest_of(FILES), FILES))
    inode = (path / "state.json").stat().st_ino
    assert Path(away.keep(digest_of(FILES), FILES)) == path
    assert (path / "state.json").stat().st_ino == inode


def test_damage_on_the_way_is_noticed(away: Node) -> None:
    with pytest.raises(CorruptCheckpoint, match="digest"):
        away.keep(digest_of(FILES), {**FILES, "state.json": b"2"})


def test_names_and_contents_cannot_be_confused() -> None:
    assert digest_of({"a": b"bc"}) != digest_of({"ab": b"c"})
    assert digest_of({"a": b"1", "b": b""}) != digest_of({"a": b"", "b": b"1"})


def test_the_next_actor_of_the_name_removes_what_a_killed_one_left(away: Node, tmp_path: Path) -> None:
    left = Path(away.keep(digest_of(FILES), FILES))
    Node("a", tmp_path / "logs" / "replica-0.log")
    assert not left.exists()


def test_the_log_outlives_the_actor(away: Node, tmp_path: Path) -> None:
    away.log.write_text("the cause")
    away.close()
    assert away.log.read_text() == "the cause"
    assert not away.scratch.exists()
    assert away.log.is_relative_to(tmp_path / "tmp")


def test_at_home_paths_are_the_supervisors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "this_node", lambda: "a")
    log = tmp_path / "logs" / "replica-0.log"
    at_home = Node("a", log)
    assert (at_home.is_home, at_home.log, at_home.address) == (True, log, "127.0.0.1")
    at_home.close()
    assert not at_home.scratch.exists()


async def test_senders_at_the_same_time_share_a_copy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    puts: list[Path] = []

    def put(directory: Path) -> tuple[str, str]:
        puts.append(directory)
        return f"digest of {directory.name}", "reference"

    monkeypatch.setattr(node_module, "put_files", put)
    parcels = Parcels()

    async def send(directory: Path) -> str:
        async with parcels.opened(directory) as (digest, _):
            await asyncio.sleep(0.05)
            return digest

    one, two = tmp_path / "one", tmp_path / "two"
    assert await asyncio.gather(send(one), send(one), send(two), send(one)) == [
        *["digest of one"] * 2,
        "digest of two",
        "digest of one",
    ]
    assert sorted(puts) == [one, two]
    await send(one)
    assert len(puts) == 3, "a copy outlives its senders"


async def test_a_directory_that_cannot_be_read_is_read_again_by_the_next_sender(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answers: list[Exception | None] = [OSError("disk"), None]

    def put(directory: Path) -> tuple[str, str]:
        if (error := answers.pop(0)) is not None:
            raise error
        return directory.name, "reference"

    monkeypatch.setattr(node_module, "put_files", put)
    parcels = Parcels()
    with pytest.raises(OSError, match="disk"):
        async with parcels.opened(tmp_path):
            pass
    async with parcels.opened(tmp_path) as (digest, _):
        assert digest == tmp_path.name


def test_an_interface_is_known_by_its_address() -> None:
    loopback = interface_of("127.0.0.1")
    assert loopback in psutil.net_if_addrs()
    assert interface_of("192.0.2.1") is None, "an address for documentation is no machine's"
