"""A real browser without a window, driven through Chromium's DevTools protocol."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class Browser:
    """One page of a browser process.

    Attributes:
        errors: exceptions that its scripts raised, and what they wrote as errors.
    """

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        log = folder / "chromium.log"
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu"]
        command += ["--disable-dev-shm-usage", "--disable-background-networking", "--no-first-run"]
        command += [f"--user-data-dir={folder / 'profile'}", "--remote-debugging-port=0"]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, "about:blank"], stdout=output, stderr=output
            )
        address = self._address(log)
        self._socket = connect(address, max_size=None, open_timeout=60)
        self._sent = 0
        self.errors: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=1240, height=1000, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip

    _session: str | None = None

    def _address(self, log: Path) -> str:
        for _ in range(600):
            found = re.search(r"DevTools listening on (ws://\S+)", log.read_text(errors="replace"))
            if found:
                return found.group(1)
            time.sleep(0.1)
        raise RuntimeError(f"the browser did not start:\n{log.read_text(errors='replace')[-2000:]}")

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._sent += 1
        message: dict[str, Any] = {"id": self._sent, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv(timeout=120))
            if answer.get("method") == "Runtime.exceptionThrown":
                details = answer["params"]["exceptionDetails"]
                self.errors.append(details.get("exception", details).get("description", ""))
            if answer.get("method") == "Log.entryAdded":
                entry = answer["params"]["entry"]
                if entry["level"] == "error":
                    self.errors.append(entry["text"])
            if answer.get("id") == self._sent:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, url: str) -> None:
        """Go to an address."""
        self._call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of an expression in the page; promises are waited for."""
        result = self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(f"{script}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait_for(self, script: str, seconds: float = 60.0) -> Any:
        """Wait until an expression is true, and return its value."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if value := self.run(script):
                    return value
            except RuntimeError:  # the page is not there yet
                pass
            time.sleep(0.1)
        raise AssertionError(f"never true: {script}; errors of the page: {self.errors}")

    def screenshot(self, path: Path) -> None:
        """Save the whole page as PNG."""
        shot = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        """End the browser."""
        self._socket.close()
        self._process.terminate()
        self._process.wait(30)
