"""A headless Chromium and one page in it, over the DevTools protocol."""

import base64
import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page:
    """`events`: what the browser told unasked, e.g. requests and errors."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket, self.number = socket, 0
        self.events: list[dict[str, Any]] = []

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": params}))
        while True:
            answer = json.loads(self.socket.recv(timeout=60))
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def open(self, path: Path) -> None:
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        self.send("Page.navigate", url=path.as_uri())
        self.wait(lambda: self.js("document.readyState") == "complete", "the page to load")

    def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        end = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < end, f"waited in vain for {what}"
            time.sleep(0.02)

    def key(self, name: str) -> None:
        text = {"text": "\r"} if name == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=KEYS[name], **text
            )
        self.settle()

    def settle(self) -> None:
        """Until the browser has drawn what was asked for."""
        self.js("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")

    def choose(self, name: str, value: str) -> None:
        """Set a control of the form and tell the page, as the browser does for a person."""
        self.js(
            f"form.elements[{json.dumps(name)}].value = {json.dumps(value)}; "
            "form.dispatchEvent(new Event('input', { bubbles: true }))"
        )
        self.settle()

    def size(self, width: int, height: int) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.settle()

    def dark(self, on: bool) -> None:
        features = [{"name": "prefers-color-scheme", "value": "dark" if on else "light"}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def screenshot(self) -> bytes:
        return base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])

    def requests(self) -> list[str]:
        """URLs that the page asked for, its own data: URLs apart."""
        asked = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in asked if not url.startswith("data:")]

    def complaints(self) -> list[str]:
        """Exceptions in the page, and what the browser logged as errors."""
        thrown = [e["params"]["exceptionDetails"] for e in self.events if e["method"] == "Runtime.exceptionThrown"]
        logged = [e["params"]["entry"] for e in self.events if e["method"] == "Log.entryAdded"]
        return [str(fault) for fault in thrown + [e for e in logged if e["level"] == "error"]]


KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Escape": 27, "Enter": 13}


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[Page]:
    """A browser whose profile lies in `folder`."""
    assert CHROMIUM
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    command = [CHROMIUM, *options, f"--user-data-dir={folder}", "--remote-debugging-port=0", "about:blank"]
    with (folder.parent / f"{folder.name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        with connect(_page_address(folder, process), max_size=None) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        process.wait(20)


def _page_address(folder: Path, process: subprocess.Popen[bytes]) -> str:
    import httpx

    told, end = folder / "DevToolsActivePort", time.monotonic() + 60
    while time.monotonic() < end:
        assert process.poll() is None, f"{CHROMIUM} ended with {process.returncode}"
        with contextlib.suppress(FileNotFoundError, ValueError, httpx.TransportError, StopIteration):
            port = int(told.read_text().splitlines()[0])
            targets = httpx.get(f"http://127.0.0.1:{port}/json", trust_env=False).json()
            address: str = next(t["webSocketDebuggerUrl"] for t in targets if t["type"] == "page")
            return address
        time.sleep(0.05)
    raise AssertionError(f"{CHROMIUM} did not start")
