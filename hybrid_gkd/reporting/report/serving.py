"""The page of runs that go on, for a browser on this machine."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hybrid_gkd.reporting.report.page import html, open_runs, page_data

HOST = "127.0.0.1"
FRESH_SECONDS = 2.0
"""Data of this age is given to another page or tab without reading the folders again."""


class ReportServer(ThreadingHTTPServer):
    """Serves the page, and `data.json` with what it shows, read anew. Raises OSError: the port is in use."""

    daemon_threads = True

    def __init__(self, folders: list[Path], port: int):
        super().__init__((HOST, port), Handler)
        self._runs, self._lock = open_runs(folders), threading.Lock()
        self._data, self._read_at = b"", float("-inf")

    @property
    def port(self) -> int:
        return self.server_address[1]

    def data(self) -> bytes:
        with self._lock:
            if time.monotonic() - self._read_at > FRESH_SECONDS:
                self._data, self._read_at = page_data(self._runs, live=True), time.monotonic()
            return self._data


class Handler(BaseHTTPRequestHandler):
    """Answers GET of the two, to whoever asks for this machine by an address that no other site can have."""

    server: ReportServer
    timeout = 60  # of a client that says nothing

    def do_GET(self) -> None:
        # A site whose name is made to lead to 127.0.0.1 is not to read the runs: the browser says which name it asked.
        if self.headers.get("Host") not in {f"{name}:{self.server.port}" for name in (HOST, "localhost")}:
            self._answer(403, "text/plain", b"only for this machine\n")
        elif self.path == "/data.json":
            self._answer(200, "application/json", self.server.data())
        elif self.path == "/":
            self._answer(200, "text/html; charset=utf-8", html(self.server.data(), live=True))
        else:
            self._answer(404, "text/plain", b"not found\n")

    def _answer(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a request every five seconds is no news."""


def serve(folders: list[Path], port: int) -> None:
    """Serve until Ctrl-C; says where. Raises OSError."""
    with ReportServer(folders, port) as server:
        print(f"http://{HOST}:{server.port}", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
