"""The files of the web application. They hold nothing of a backend, so they need no key."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter
from starlette.responses import Response

from insitu.web_pages import FILES, api_page, page


def page_routes() -> APIRouter:
    """Build the router: one route per file, so that each is in the table of routes."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    def first_page() -> Response:
        """Return the application."""
        return api_page()

    for name in FILES:
        router.add_api_route(f"/{name}", _answering(name), methods=["GET"])
    return router


def _answering(name: str) -> Callable[[], Response]:
    def answer() -> Response:
        return page(name)

    return answer
