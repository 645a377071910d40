"""The rules for listening: certificate and key of a server, and where plain HTTP is allowed."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from insitu.errors import InvalidRequest
from insitu.system.keys import is_loopback

if TYPE_CHECKING:
    from argparse import ArgumentParser

CERTIFICATE_OPTION, KEY_OPTION, PROXY_OPTION = "--tls-certificate", "--tls-key", "--behind-proxy"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Certificate chain and private key of a server, as PEM files."""

    certificate: Path
    key: Path

    def context(self) -> ssl.SSLContext:
        """Read both files for a server; reject a pair that cannot be used."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.certificate, self.key, password=self._refuse_password)
        except (OSError, ValueError) as error:
            raise InvalidRequest(
                f"{CERTIFICATE_OPTION} {self.certificate} and {KEY_OPTION} {self.key} are not a certificate "
                f"and its key in PEM: {error}",
                hint=f"compare `openssl x509 -noout -pubkey -in {self.certificate}` with "
                f"`openssl pkey -pubout -in {self.key}`: they must print the same",
            ) from error
        return context

    def check(self) -> None:
        """Reject files that are missing or do not belong together, and a key that others can read."""
        for option, path in ((CERTIFICATE_OPTION, self.certificate), (KEY_OPTION, self.key)):
            try:
                path.open("rb").close()
            except OSError as error:
                raise InvalidRequest(
                    f"{option} {path} cannot be read: {error.strerror}", hint=f"ls -l {path}"
                ) from error
        mode = self.key.stat().st_mode & 0o777
        if mode & 0o077:
            raise InvalidRequest(
                f"{KEY_OPTION} {self.key} can be read or changed by others (mode {mode:o})",
                hint=f"chmod 600 {self.key}",
            )
        self.context()

    def _refuse_password(self) -> str:
        raise InvalidRequest(
            f"{KEY_OPTION} {self.key} is encrypted, and nobody is there to type its passphrase",
            hint=f"(umask 077; openssl pkey -in {self.key} -out plain.key), then {KEY_OPTION} plain.key",
        )


def tls_files(certificate: str | Path | None, key: str | Path | None) -> TlsFiles | None:
    """Return the pair; None for plain HTTP. One file without the other is rejected."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        options = (KEY_OPTION, CERTIFICATE_OPTION)
        given, missing = options if certificate is None else options[::-1]
        raise InvalidRequest(f"{given} is given without {missing}", hint=f"add {missing} FILE")
    return TlsFiles(Path(certificate).absolute(), Path(key).absolute())


def check_listener(host: str, tls: TlsFiles | None, *, behind_proxy: bool) -> None:
    """Reject plain HTTP that others could read on its way, and TLS files that cannot be used."""
    if tls is not None and behind_proxy:
        raise InvalidRequest(
            f"{PROXY_OPTION} says that a proxy terminates TLS, {CERTIFICATE_OPTION} that this server does",
            hint=f"remove {PROXY_OPTION}; a proxy may speak HTTPS to this server as well",
        )
    if tls is not None:
        tls.check()
    elif not behind_proxy and not is_loopback(host):
        raise InvalidRequest(
            f"refusing to listen on {host} without TLS: others could read keys and calls on their way",
            hint=f"add {CERTIFICATE_OPTION} FILE {KEY_OPTION} FILE, or {PROXY_OPTION} if a proxy in front "
            "of it terminates TLS",
        )


def add_listener_options(parser: ArgumentParser) -> None:
    """Add the options of a process that listens: its names, and those that `listener_arguments` writes."""
    parser.add_argument("--allowed-host", action="append", default=[], help="a name clients may call it by")
    parser.add_argument(CERTIFICATE_OPTION, help="PEM file of the certificate and its chain")
    parser.add_argument(KEY_OPTION, help="PEM file of the certificate's key")
    parser.add_argument(PROXY_OPTION, action="store_true", help="a proxy in front of it terminates TLS")


def listener_arguments(tls: TlsFiles | None, *, behind_proxy: bool) -> list[str]:
    """Return the options for a child process that listens in the same way."""
    files = [] if tls is None else [CERTIFICATE_OPTION, str(tls.certificate), KEY_OPTION, str(tls.key)]
    return [*files, PROXY_OPTION] if behind_proxy else files


def scheme_of(tls: TlsFiles | None) -> Literal["http", "https"]:
    """Return the scheme of a server's URLs."""
    return "http" if tls is None else "https"
