"""A headless Chromium, driven over its DevTools protocol through a pipe."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SECONDS = 60.0


def find_browser() -> str | None:
    """$CHROMIUM, else the first on the PATH."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """A tab. `problems`: errors and warnings of its console, exceptions; `requests`: what it asked for, by URL."""

    def __init__(self, to_browser: int, from_browser: int):
        self._to, self._from, self._unread, self._ids = to_browser, from_browser, b"", itertools.count(1)
        self._session: dict[str, str] = {}
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> Any:
        """The result of a command."""
        number = next(self._ids)
        command = {"id": number, "method": method, "params": params, **self._session}
        os.write(self._to, json.dumps(command).encode() + b"\0")
        deadline = time.monotonic() + SECONDS
        while True:
            message = self._receive(deadline)
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                return message["result"]

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the browser has not answered in {SECONDS:.0f} s"
            got = os.read(self._from, 2**20)
            assert got, "the browser has ended"
            self._unread += got
        text, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event: str | None, params: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(params["args"]))
        elif event == "Log.entryAdded":
            self.problems.append(json.dumps(params["entry"]))
        elif event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(self, url: str, width: int = 1280, height: int = 900, *, dark: bool = False) -> None:
        """Load a page, and wait for it."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=features)
        self.send("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, with promises awaited."""
        found = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Until it is true."""
        deadline = time.monotonic() + SECONDS
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < deadline, f"in {SECONDS:.0f} s never true: {expression}; {self.problems}"
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """A key, where the focus is."""
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def move_to(self, x: float, y: float) -> None:
        """The pointer."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def tap(self, x: float, y: float) -> None:
        """A finger, for a moment."""
        self.send("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))


@contextlib.contextmanager
def browser_page(browser: str) -> Iterator[Page]:
    """A tab of a browser of its own."""
    (in_read, in_write), (out_read, out_write) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = [
            "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe",
            "--disable-background-networking", "--disable-dev-shm-usage", f"--user-data-dir={profile}",
        ]
        command = f'exec "$@" 3<&{in_read} 4>&{out_write}'
        process = subprocess.Popen(
            ["bash", "-c", command, "bash", browser, *options], pass_fds=(in_read, out_write),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        os.close(in_read)
        os.close(out_write)
        try:
            page = Page(in_write, out_read)
            yield page
        finally:
            os.close(in_write)
            os.close(out_read)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
