"""The sockets on which a process and its descendants listen."""

from __future__ import annotations

import ipaddress

import psutil


def listening_addresses(pid: int) -> dict[str, str]:
    """Map each address and port that the process tree listens on to the name of its process."""
    root = psutil.Process(pid)
    found: dict[str, str] = {}
    for process in [root, *root.children(recursive=True)]:
        try:
            name, sockets = process.name(), process.net_connections("tcp")
        except psutil.NoSuchProcess:
            continue
        for socket in sockets:
            if socket.status == psutil.CONN_LISTEN:
                found[f"{socket.laddr.ip} {socket.laddr.port}"] = name
    return found


def beyond_loopback(pid: int) -> dict[str, str]:
    """Return those of `listening_addresses` that other machines can reach."""
    return {
        address: name
        for address, name in listening_addresses(pid).items()
        if not _is_loopback(address.split()[0])
    }


def _is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback
