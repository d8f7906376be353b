"""HTTP server of the live report page, for browsers on this machine."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hybrid_gkd.reporting.report.page import html, open_runs, page_data

HOST = "127.0.0.1"
FRESH_SECONDS = 2.0
"""Age in seconds up to which data is reused for another request."""


class ReportServer(ThreadingHTTPServer):
    """Serves the page, and its current data as `data.json`. Raises OSError: the port is in use."""

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
    """Handles GET of the page and its data, for requests addressed to this machine only."""

    server: ReportServer
    timeout = 60  # seconds, of a silent client

    def do_GET(self) -> None:
        # Against DNS rebinding: a host name that resolves to 127.0.0.1 must not give access to the runs.
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
        """Log nothing: the page polls every five seconds."""


def serve_report(folders: list[Path], port: int) -> None:
    """Print the address and serve until Ctrl-C. Raises OSError."""
    with ReportServer(folders, port) as server:
        print(f"http://{HOST}:{server.port}", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
