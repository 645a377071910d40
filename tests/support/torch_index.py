"""PyTorch's index of CPU builds on loopback, behind a proxy that sends everything else where it belongs.

    pip, uv ──CONNECT──► Proxy ──► download.pytorch.org:443  = TorchIndex (TLS, a certificate of its own)
                               └─► any other host, untouched

The index has stand-ins for the wheels of torch and its companions: metadata alone, for torch that of the
installed one, so that a resolver reads real requirements and nobody downloads 190 MB.
"""

from __future__ import annotations

import http.server
import os
import socket
import ssl
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import distribution
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote, unquote

from tests.support.certificates import self_signed, signed

HOST = "download.pytorch.org"
_TAG = "cp311-cp311-manylinux_2_28_x86_64"
_COMPANIONS = (("torchvision", "0.28.0+cpu"), ("torchaudio", "2.11.0+cpu"), ("torchcodec", "0.14.0+cpu"))
_CHUNK = 65_536
_CONNECT_SECONDS = 30


@contextmanager
def torch_index(folder: Path) -> Iterator[dict[str, str]]:
    """Serve the index; yields the environment in which pip and uv find it under its real address."""
    authority = self_signed(folder, "authority")
    tls = signed(folder, authority, "torch-index", f"DNS:{HOST}")
    bundle = folder / "authorities.pem"
    known = ssl.get_default_verify_paths()
    system = os.environ.get("SSL_CERT_FILE") or known.cafile or known.openssl_cafile
    bundle.write_text(Path(system).read_text() + authority.certificate.read_text())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.certificate, tls.key)
    index = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _pages(_wheels(folder)))
    index.socket = context.wrap_socket(index.socket, server_side=True)
    proxy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _proxy(index.server_address[1]))
    servers = [index, proxy]
    for server in servers:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        address = f"http://127.0.0.1:{proxy.server_address[1]}"
        certificates = dict.fromkeys(("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"), str(bundle))
        yield {"HTTPS_PROXY": address, "https_proxy": address, "NO_PROXY": "", **certificates}
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def _wheels(folder: Path) -> dict[str, Path]:
    """Write the wheels; returns them by the name of their project."""
    torch = distribution("torch")
    metadata = torch.read_text("METADATA")
    assert metadata is not None
    assert torch.version == "2.13.0+cpu"
    texts = {("torch", torch.version): metadata}
    for name, version in _COMPANIONS:
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        texts[name, version] = f"{head}Requires-Dist: torch==2.13.0\n"
    return {name: _wheel(folder, name, version, text) for (name, version), text in texts.items()}


def _wheel(folder: Path, name: str, version: str, metadata: str) -> Path:
    path, info = folder / f"{name}-{version}-{_TAG}.whl", f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {_TAG}\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def _pages(wheels: dict[str, Path]) -> type[http.server.BaseHTTPRequestHandler]:
    class Pages(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        files: ClassVar[dict[str, Path]] = {wheel.name: wheel for wheel in wheels.values()}

        def do_GET(self) -> None:
            name = unquote(self.path).removeprefix("/whl/cpu/")
            if wheel := wheels.get(name.removesuffix("/")):
                self._answer("text/html", f'<a href="/whl/cpu/{quote(wheel.name)}">{wheel.name}</a>'.encode())
            elif wheel := self.files.get(name):
                self._answer("application/octet-stream", wheel.read_bytes())
            else:
                self.send_error(404)

        do_HEAD = do_GET

        def _answer(self, kind: str, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the base class
            pass

    return Pages


def _proxy(index_port: int) -> type[http.server.BaseHTTPRequestHandler]:
    class Proxy(http.server.BaseHTTPRequestHandler):
        own: ClassVar[tuple[str, int]] = ("127.0.0.1", index_port)

        def do_CONNECT(self) -> None:
            host, _, port = self.path.rpartition(":")
            address = self.own if host == HOST else (host, int(port))
            try:
                upstream = socket.create_connection(address, timeout=_CONNECT_SECONDS)
            except OSError as error:
                self.send_error(502, str(error))
                return
            self.send_response(200)
            self.end_headers()
            back = threading.Thread(target=_copy, args=(upstream, self.connection), daemon=True)
            back.start()
            _copy(self.connection, upstream)
            back.join()
            self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the base class
            pass

    return Proxy


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(_CHUNK):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
