"""A headless Chromium, driven over a pipe by its DevTools protocol, for tests of pages: no other package is needed.

with Browser() as browser:
    browser.open(Path("page.html"), width=1400)
    assert browser.run("document.title") == "..." and not browser.errors
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --hide-scrollbars".split()
QUIET = "--disable-background-networking --disable-component-update --disable-extensions --disable-sync".split()


class Browser:
    """One page. errors: what its console has reported since `open`: exceptions, errors, failed loads."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        ours, theirs = os.pipe(), os.pipe()  # it reads file 3 and writes file 4
        wiring = f'exec 3<&{ours[0]} 4>&{theirs[1]}; exec "$@"'
        words = [
            PROGRAM,
            *FLAGS,
            *QUIET,
            "--remote-debugging-pipe",
            f"--user-data-dir={self.folder.name}",
            "about:blank",
        ]
        self.process = subprocess.Popen(
            ["bash", "-c", wiring, "bash", *words], pass_fds=(ours[0], theirs[1]), stderr=subprocess.DEVNULL
        )
        os.close(ours[0])
        os.close(theirs[1])
        self.to, self.from_ = os.fdopen(ours[1], "wb"), os.fdopen(theirs[0], "rb")
        self.number, self.buffer, self.errors, self.session = 0, b"", [], None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.wait()
        self.to.close()
        self.from_.close()
        self.folder.cleanup()

    def call(self, method: str, **parameters) -> dict:
        """Send a command and return its result."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        self.to.write(json.dumps(message).encode() + b"\0")
        self.to.flush()
        while True:
            answer = self._read()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self) -> dict:
        while b"\0" not in self.buffer:
            part = os.read(self.from_.fileno(), 1 << 20)
            assert part, "the browser has ended"
            self.buffer += part
        text, _, self.buffer = self.buffer.partition(b"\0")
        message = json.loads(text)
        method, about = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = about["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.errors.append(about["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "assert"):
            self.errors.append(str(about["args"]))
        return message

    def open(self, page: Path, width: int, height: int = 900, dark: bool = False) -> None:
        """Load a file in a window of this size, and wait until its scripts have run."""
        self.errors.clear()
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.resize(width, height)
        self.call("Page.navigate", url=page.resolve().as_uri())
        deadline = time.monotonic() + 60
        while self.run("document.readyState") != "complete" or self.run("location.href") == "about:blank":
            assert time.monotonic() < deadline, "the page does not load"
            time.sleep(0.02)

    def resize(self, width: int, height: int = 900) -> None:
        size = dict(width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def run(self, script: str):
        """Return the value of a JavaScript expression. Raises AssertionError with its exception."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def press(self, key: str) -> None:
        """Press a key on the element that has the focus."""
        codes = {"ArrowRight": 39, "ArrowLeft": 37, "Enter": 13, "Tab": 9, "End": 35, "Home": 36}
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            code = codes[key]
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def click(self, selector: str) -> None:
        """Click in the middle of an element, as a mouse does."""
        middle = (
            "(e => { e.scrollIntoView({block: 'center', inline: 'center'}); const r = e.getBoundingClientRect(); "
            "return [r.x + r.width / 2, r.y + r.height / 2]; })"
        )
        x, y = self.run(f"{middle}(document.querySelector({json.dumps(selector)}))")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, path: Path) -> None:
        """Write the whole page as a PNG."""
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(picture["data"]))
