"""Certificates for tests, made by the `openssl` command."""

from __future__ import annotations

import subprocess
from pathlib import Path

from insitu.system.tls import TlsFiles

NAMES = "IP:127.0.0.1,DNS:localhost"


def self_signed(folder: Path, name: str = "server", names: str = NAMES) -> TlsFiles:
    """Make a certificate that is its own authority; the key has mode 600."""
    return _certificate(folder, name, names)


def signed(folder: Path, authority: TlsFiles, name: str, names: str) -> TlsFiles:
    """Make a certificate of an authority; some clients accept no other."""
    issued = ["-CA", str(authority.certificate), "-CAkey", str(authority.key)]
    return _certificate(folder, name, names, *issued, "-addext", "basicConstraints=critical,CA:FALSE")


def _certificate(folder: Path, name: str, names: str, *more: str) -> TlsFiles:
    files = TlsFiles(folder / f"{name}.pem", folder / f"{name}.key")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    made = ["-keyout", str(files.key), "-out", str(files.certificate)]
    subject = ["-days", "2", "-subj", f"/CN=insitu-test-{name}", "-addext", f"subjectAltName={names}"]
    subprocess.run(
        ["openssl", "req", "-x509", *curve, *made, *subject, *more], check=True, capture_output=True
    )
    files.key.chmod(0o600)
    return files
