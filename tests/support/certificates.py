"""Certificates for tests, made by the `openssl` command."""

from __future__ import annotations

import subprocess
from pathlib import Path

from insitu.system.tls import TlsFiles

NAMES = "IP:127.0.0.1,DNS:localhost"


def self_signed(folder: Path, name: str = "server", names: str = NAMES) -> TlsFiles:
    """Make a certificate that is its own authority; the key has mode 600."""
    files = TlsFiles(folder / f"{name}.pem", folder / f"{name}.key")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    made = ["-keyout", str(files.key), "-out", str(files.certificate)]
    subject = ["-days", "2", "-subj", "/CN=insitu-test", "-addext", f"subjectAltName={names}"]
    subprocess.run(["openssl", "req", "-x509", *curve, *made, *subject], check=True, capture_output=True)
    files.key.chmod(0o600)
    return files
