"""A server that records what is posted to it, in place of a product's API."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class RecordingServer:
    """Answers 200, or `status` where Langfuse takes scores, and JSON with `answer` in it."""

    def __init__(
        self, status: int = 207, errors: Sequence[dict[str, Any]] = (), answer: dict[str, Any] | None = None
    ) -> None:
        self.got: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.got.append((self.path, dict(self.headers), body))
                content = json.dumps({"successes": [], "errors": list(errors), **(answer or {})}).encode()
                self.send_response(status if self.path.endswith("ingestion") else 200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for at, _, body in self.got if at == path]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
