"""The node of a Ray actor, and the directories that travel between it and the supervisor's.

On the supervisor's own node a path means the same to both. Elsewhere an actor gets a directory's files
through Ray's object store and keeps them under their digest, until it ends or the next of its name starts.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray

from insitu.backend.fleet.cluster import check_room
from insitu.backend.fleet.ray_door import LOOPBACK
from insitu.errors import CorruptCheckpoint
from insitu.system.processes import free_port

Files = dict[str, bytes]
"""A directory's files by their path in it."""


def this_node() -> str:
    """Return Ray's id of the node that this process runs on."""
    return ray.get_runtime_context().get_node_id()


def interface_of(address: str) -> str | None:
    """Return the name of this node's network interface with an address; None if no interface has it."""
    named = psutil.net_if_addrs().items()
    return next((name for name, found in named if any(one.address == address for one in found)), None)


def read_files(directory: Path) -> Files:
    """Read a directory whole."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


def write_files(files: Mapping[str, bytes], directory: Path) -> None:
    """Write files below a directory, which may exist; the caller makes them durable."""
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def digest_of(files: Mapping[str, bytes]) -> str:
    """Return the SHA-256 of names and contents."""
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{len(name.encode())} {name} {len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()


def put_files(directory: Path) -> tuple[str, ray.ObjectRef[Files]]:
    """Put a directory's files into the object store; return their digest and the reference."""
    files = read_files(directory)
    check_room(sum(map(len, files.values())), f"the directory {directory.name}")
    return digest_of(files), ray.put(files)


class Parcels:
    """Directories on their way to other nodes: whoever sends one at the same time shares a single copy."""

    def __init__(self) -> None:
        self._puts: dict[Path, asyncio.Task[tuple[str, ray.ObjectRef[Files]]]] = {}
        self._senders: Counter[Path] = Counter()

    @asynccontextmanager
    async def opened(self, directory: Path) -> AsyncGenerator[tuple[str, ray.ObjectRef[Files]]]:
        """Yield the digest and the reference, as `put_files` does; the last sender frees the copy."""
        if directory not in self._puts:
            self._puts[directory] = asyncio.create_task(asyncio.to_thread(put_files, directory))
        self._senders[directory] += 1
        try:
            yield await asyncio.shield(self._puts[directory])
        finally:
            self._senders[directory] -= 1
            if not self._senders[directory]:
                del self._senders[directory], self._puts[directory]


@dataclass(frozen=True, slots=True)
class Place:
    """The node of an actor, as the supervisor is told of it."""

    is_home: bool
    """True on the supervisor's own node."""
    address: str
    """The node's address in the cluster."""
    port: int
    """One that is free there."""


class Node:
    """The node of this actor, as a supervisor on the node `home` sees it."""

    def __init__(self, home: str | None, log: Path) -> None:
        """`home`: None if there is no cluster. `log`: the actor's log on the supervisor's node."""
        self.is_home = home is None or home == this_node()
        own = Path(tempfile.gettempdir()) / f"insitu-{(home or '')[:12]}"  # short: vLLM's sockets lie in it
        self.log = log if self.is_home else own / log.name
        self.scratch = own / log.stem
        """On another node, the folder for files of this actor."""
        if not self.is_home:
            self.close()  # what an earlier actor of this name left when it was killed
            self.scratch.mkdir(parents=True)

    @property
    def address(self) -> str:
        """The address by which the supervisor's node reaches this one."""
        return LOOPBACK if self.is_home else ray.util.get_node_ip_address()

    def place(self) -> Place:
        """Return where this actor runs."""
        address = ray.util.get_node_ip_address()
        return Place(self.is_home, address, free_port(address))

    def keep(self, digest: str, files: Files) -> str:
        """Write a directory that the supervisor sent, unless it is here; return its path."""
        directory = self.scratch / digest
        if not directory.exists():
            if (found := digest_of(files)) != digest:
                raise CorruptCheckpoint(f"files arrived with the digest {found} instead of {digest}")
            unfinished = directory.with_suffix(".part")
            write_files(files, unfinished)
            unfinished.rename(directory)
        return str(directory)

    def discard(self, digest: str) -> None:
        """Remove a directory that was sent; it may be gone."""
        shutil.rmtree(self.scratch / digest, ignore_errors=True)

    def close(self) -> None:
        """Remove this actor's files, if it is on another node; its log stays."""
        if not self.is_home:
            shutil.rmtree(self.scratch, ignore_errors=True)
