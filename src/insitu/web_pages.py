"""The built web application, which `insitu view` and the API serve, and the headers of their answers."""

from __future__ import annotations

from pathlib import Path

from starlette.datastructures import MutableHeaders
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.types import Message, Send

from insitu.errors import NotFound

PAGES = Path(__file__).resolve().parent / "view" / "pages"
FILES = ("app.js", "app.css", "icon.svg")
"""All files of the application but its first page."""
_INDEX = "index.html"
_DIRECTORY = b'<meta name="insitu-server" content="directory" />'
_API = b'<meta name="insitu-server" content="api" />'
"""Tells the application which server it talks to, and so which pages there are."""
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".json": "application/json",
    ".txt": "text/plain; charset=utf-8",
}
_MISSING = """The web pages are not in this installation: {folder} has no index.html.

They are built from web/ and are part of the wheel. The data is there without them.
"""
_POLICY = "; ".join(
    [
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "img", "font", "connect")),
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
}


def guarded(send: Send) -> Send:
    """Return a sender that adds the headers to every answer."""

    async def with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers[name] = value
        await send(message)

    return with_headers


def page(path: str, folder: Path = PAGES) -> Response:
    """Return a file, or the application for addresses that it routes itself."""
    if not (folder / _INDEX).is_file():
        return PlainTextResponse(_MISSING.format(folder=folder), 503)
    wanted = _file(path, folder)
    if wanted is not None:
        # Names below assets/ change with their content.
        keep = "public, max-age=31536000, immutable" if path.startswith("assets/") else "no-cache"
        return FileResponse(wanted, media_type=_TYPES[wanted.suffix], headers={"cache-control": keep})
    if "." in path.rsplit("/", 1)[-1]:
        raise NotFound(f"/{path} is not one of the pages")
    return FileResponse(folder / _INDEX, media_type=_TYPES[".html"], headers={"cache-control": "no-cache"})


def _file(path: str, folder: Path) -> Path | None:
    try:
        wanted = (folder / path).resolve()
        is_page = wanted.is_relative_to(folder.resolve()) and wanted.is_file() and wanted.suffix in _TYPES
    except (OSError, ValueError):  # too long, or with a NUL
        return None
    return wanted if is_page else None


def api_page(folder: Path = PAGES) -> Response:
    """Return the application's first page, told that it talks to the API."""
    try:
        built = (folder / _INDEX).read_bytes()
    except FileNotFoundError:
        return PlainTextResponse(_MISSING.format(folder=folder), 503)
    content = built.replace(_DIRECTORY, _API)
    return Response(content, media_type=_TYPES[".html"], headers={"cache-control": "no-cache"})
