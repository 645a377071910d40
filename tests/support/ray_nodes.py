"""Ray nodes as machines of their own: each with a network namespace, and none sees the others' files.

The hub is where `insitu serve` runs, with Ray's head that computes nothing. Every other node has a link
to it, which can be slowed and cut. The folder that holds all files of a test is hidden from the other nodes:
in its place each has an empty one of its own.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

HUB_ADDRESS = "10.77.0.1"
HEAD = f"{HUB_ADDRESS}:6379"
_START_SECONDS = 60.0
_CLONE_NEWNET = 0x40000000
_HIDDEN = 'mount -t tmpfs -o size=512m none "$0" && mkdir -p "$0/tmp" && exec "$@"'
_RAY = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
_RAY += ["--object-store-memory", str(100 * 2**20)]


def missing() -> str | None:
    """The reason why namespaces cannot be made here, if there is one."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "network namespaces need iproute2 and util-linux"
    probe = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, check=False)
    return None if probe.returncode == 0 else "this kernel or container forbids namespaces"


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)


@dataclass
class RayNode:
    """One machine beside the hub, with one processor."""

    cluster: Cluster
    number: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def namespace(self) -> str:
        return f"{self.cluster.name}-{self.number}"

    @property
    def address(self) -> str:
        return f"10.77.{self.number}.2"

    @property
    def _link(self) -> str:
        return f"{self.cluster.name}h{self.number}"

    def connect(self) -> None:
        """Make the namespace and its link to the hub."""
        hub, ours = self.cluster.hub, f"{self.cluster.name}n{self.number}"
        run("ip", "netns", "add", self.namespace)
        run("ip", "link", "add", self._link, "netns", hub, "type", "veth", "peer", ours)
        run("ip", "link", "set", ours, "netns", self.namespace)
        run("ip", "-n", hub, "address", "add", f"10.77.{self.number}.1/24", "dev", self._link)
        run("ip", "-n", self.namespace, "address", "add", f"{self.address}/24", "dev", ours)
        for namespace, device in ((self.namespace, "lo"), (self.namespace, ours), (hub, self._link)):
            run("ip", "-n", namespace, "link", "set", device, "up")
        run("ip", "-n", self.namespace, "route", "add", "default", "via", f"10.77.{self.number}.1")

    def start(self) -> None:
        """Start Ray there, as a service manager would."""
        ray = [*_RAY, "--address", HEAD, "--node-ip-address", self.address, "--num-cpus", "1"]
        env = {**os.environ, **self.cluster.env, "TMPDIR": str(self.cluster.folder / "tmp")}
        command = ["ip", "netns", "exec", self.namespace, "unshare", "--mount"]
        command += ["sh", "-c", _HIDDEN, str(self.cluster.folder), *ray]
        self.process = self.cluster.spawn(command, self.namespace, env)

    def wait_joined(self) -> None:
        """Wait until Ray's head has the node."""
        deadline = time.monotonic() + _START_SECONDS
        output = self.cluster.folder / f"{self.namespace}.out"
        while "Ray runtime started" not in output.read_text():
            assert time.monotonic() < deadline, f"{self.namespace} does not join:\n{output.read_text()}"
            time.sleep(0.5)

    def pids(self) -> list[int]:
        """Every process there."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True
        )
        return [int(pid) for pid in listed.stdout.split()]

    def has(self, part: str) -> bool:
        """True if a process there has this in its command line."""
        for pid in self.pids():
            try:
                if part in " ".join(psutil.Process(pid).cmdline()):
                    return True
            except psutil.NoSuchProcess:
                continue
        return False

    def slow(self, rate: str) -> None:
        """Let so much through per second, in both directions."""
        for namespace, device in (
            (self.cluster.hub, self._link),
            (self.namespace, f"{self.cluster.name}n{self.number}"),
        ):
            shaped = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "400ms"]
            run("tc", "-n", namespace, "qdisc", "replace", "dev", device, *shaped)

    def cut(self) -> None:
        """Take the cable out."""
        run("ip", "-n", self.cluster.hub, "link", "set", self._link, "down")

    def heal(self) -> None:
        run("ip", "-n", self.cluster.hub, "link", "set", self._link, "up")

    def kill(self) -> None:
        """Let every process end at once, as without power."""
        deadline = time.monotonic() + 20
        while pids := self.pids():
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            assert time.monotonic() < deadline, f"processes {pids} outlive SIGKILL"
            time.sleep(0.2)
        if self.process is not None:
            self.process.wait(10)


@dataclass
class Cluster:
    """The hub and its nodes; everything is gone after `running_cluster`."""

    folder: Path
    name: str = field(default_factory=lambda: f"i{secrets.token_hex(2)}")
    nodes: list[RayNode] = field(default_factory=list[RayNode])
    token: str = field(default_factory=lambda: secrets.token_hex(32))
    head: subprocess.Popen[bytes] | None = None

    @property
    def hub(self) -> str:
        return f"{self.name}-hub"

    @property
    def env(self) -> dict[str, str]:
        """The environment of every part. A node counts as lost after seconds instead of half a minute."""
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            "RAY_health_check_initial_delay_ms": "2000",
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "3000",
            "RAY_health_check_failure_threshold": "4",
            "RAY_gcs_rpc_server_reconnect_timeout_s": "15",
            "HF_HUB_OFFLINE": "1",
        }

    def spawn(self, command: list[str], name: str, env: dict[str, str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.out").open("ab") as out:
            return subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)

    def start(self, num_nodes: int) -> None:
        run("ip", "netns", "add", self.hub)
        run("ip", "-n", self.hub, "link", "set", "lo", "up")
        run("ip", "-n", self.hub, "address", "add", f"{HUB_ADDRESS}/32", "dev", "lo")
        run("ip", "netns", "exec", self.hub, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        self.nodes = [RayNode(self, number) for number in range(1, num_nodes + 1)]
        for node in self.nodes:
            node.connect()
        head = [*_RAY, "--head", "--port", "6379", "--node-ip-address", HUB_ADDRESS, "--num-cpus", "0"]
        head += ["--include-dashboard", "false", "--temp-dir", str(self.folder / "ray")]
        env = {**os.environ, **self.env}
        self.head = self.spawn(["ip", "netns", "exec", self.hub, *head], "head", env)

    def end(self) -> None:
        for node in self.nodes:
            node.kill()
        if self.head is not None:
            listed = subprocess.run(
                ["ip", "netns", "pids", self.hub], capture_output=True, text=True, check=True
            )
            for pid in map(int, listed.stdout.split()):
                if pid != os.getpid():
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        continue
            self.head.wait(10)
        for namespace in (*[node.namespace for node in self.nodes], self.hub):
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def _enter(namespace: int) -> None:
    """Move this thread into a network namespace; threads and processes that it starts are there, too."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


@contextmanager
def running_cluster(num_nodes: int) -> Iterator[Cluster]:
    """A hub, inside which this block runs, and so many nodes."""
    outside = os.open("/proc/self/ns/net", os.O_RDONLY)
    with tempfile.TemporaryDirectory(prefix="n-", ignore_cleanup_errors=True) as folder:
        cluster = Cluster(Path(folder))
        try:
            cluster.start(num_nodes)
            inside = os.open(f"/run/netns/{cluster.hub}", os.O_RDONLY)
            _enter(inside)
            os.close(inside)
            _wait_for_head()
            for node in cluster.nodes:
                node.start()
            for node in cluster.nodes:
                node.wait_joined()
            yield cluster
        finally:
            _enter(outside)
            os.close(outside)
            cluster.end()


def _wait_for_head() -> None:
    import socket

    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            socket.create_connection((HUB_ADDRESS, 6379), 1).close()
            return
        except OSError:
            assert time.monotonic() < deadline, "Ray's head does not listen"
            time.sleep(0.5)
