"""The built web pages: files of this package, served as they are."""

from __future__ import annotations

from pathlib import Path

from starlette.responses import FileResponse, PlainTextResponse, Response

from insitu.errors import NotFound

PAGES = Path(__file__).resolve().parents[1] / "pages"
_INDEX = "index.html"
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
_MISSING = """The web pages of `insitu view` are not in this installation: {folder} has no index.html.

They are built from web/ and are part of the wheel. The data is there without them: GET /view/v1/runs
"""


def page(path: str, folder: Path = PAGES) -> Response:
    """Return a file, or the application for addresses that it routes itself."""
    if not (folder / _INDEX).is_file():
        return PlainTextResponse(_MISSING.format(folder=folder), 503)
    wanted = (folder / path).resolve()
    root = folder.resolve()
    if wanted.is_relative_to(root) and wanted.is_file() and wanted.suffix in _TYPES:
        # Names below assets/ change with their content.
        keep = "public, max-age=31536000, immutable" if path.startswith("assets/") else "no-cache"
        return FileResponse(wanted, media_type=_TYPES[wanted.suffix], headers={"cache-control": keep})
    if "." in path.rsplit("/", 1)[-1]:
        raise NotFound(f"/{path} is not one of the pages")
    return FileResponse(folder / _INDEX, media_type=_TYPES[".html"], headers={"cache-control": "no-cache"})
