"""The rules for API keys: how strong one must be for an address, and how they are stored."""

from __future__ import annotations

import hashlib
import ipaddress
import os
from collections.abc import Mapping

from insitu.errors import InvalidRequest

DEFAULT_KEY = "default"
MIN_PUBLIC_KEY_CHARS = 32


def key_of(environment: Mapping[str, str] = os.environ) -> str:
    """Return the key that a command uses: INSITU_API_KEY, or the default."""
    return environment.get("INSITU_API_KEY") or DEFAULT_KEY


def check_key(api_key: str, host: str) -> None:
    """Reject a missing key, and a weak one on an address that others can reach."""
    if not api_key:
        raise InvalidRequest("the API key is empty", hint="set INSITU_API_KEY")
    if is_loopback(host):
        return
    if api_key == DEFAULT_KEY or len(api_key) < MIN_PUBLIC_KEY_CHARS:
        raise InvalidRequest(
            f"refusing to listen on {host}: the key is `default` or shorter than {MIN_PUBLIC_KEY_CHARS} "
            "characters, which is accepted on loopback only",
            hint='export INSITU_API_KEY="$(openssl rand -hex 32)"',
        )


def hash_key(key: str) -> bytes:
    """Hash a key. Keys have 256 random bits, so a plain hash cannot be reversed by guessing."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def is_loopback(host: str) -> bool:
    """Return True if an address or host name reaches only this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_address(text: str) -> bool:
    """Return True for an IP address, as opposed to a name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
