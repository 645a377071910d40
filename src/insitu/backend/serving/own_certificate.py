"""The certificate by which the supervisor recognises its own gateway and API."""

from __future__ import annotations

import hashlib
import hmac
import ssl
from asyncio import BaseTransport
from pathlib import Path

import aiohttp


class OwnCertificate(aiohttp.Fingerprint):
    """Accepts a server that holds the key of one certificate file, by whatever name it is called.

    The supervisor calls its children by their address, which the certificate need not name, and an expired
    certificate must not stop training. So the certificate itself is compared. A renewed file counts as well:
    a child that is started again serves it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at_start = digest_of(path)
        super().__init__(self._at_start)

    def check(self, transport: BaseTransport) -> None:
        """Raise ServerFingerprintMismatch before anything is sent to another server."""
        shown = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
        got = hashlib.sha256(shown or b"").digest()
        if hmac.compare_digest(got, self._at_start) or got == self._now():
            return
        host, port, *_ = transport.get_extra_info("peername")
        raise aiohttp.ServerFingerprintMismatch(self._at_start, got, host, port)

    def _now(self) -> bytes | None:
        try:
            return digest_of(self._path)
        except (OSError, ValueError):  # it is being replaced
            return None


def digest_of(path: Path) -> bytes:
    """Return the SHA-256 of the first certificate in a PEM file, which is the server's own."""
    text = path.read_text()
    begin, end = text.find(ssl.PEM_HEADER), text.find(ssl.PEM_FOOTER)
    if begin < 0 or end < begin:
        raise ValueError(f"{path} holds no certificate in PEM")
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(text[begin : end + len(ssl.PEM_FOOTER)])).digest()
