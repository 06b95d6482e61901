"""A headless Chromium, driven over the W3C WebDriver protocol by Debian's chromedriver."""

import base64
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from support.waiting import WAIT_S, until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""What an element's id is called in messages, by the standard."""
KEYS = {"Enter": "\ue007", "Escape": "\ue00c", "Tab": "\ue004", "ArrowLeft": "\ue012", "ArrowRight": "\ue014"}


class Browser:
    """One tab. Elements are named by CSS selectors."""

    def __init__(self, http: httpx.Client, session: str) -> None:
        self._http, self._session = http, f"/session/{session}"

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        answer = self._http.request(method, self._session + path, json=body if method == "POST" else None)
        value = answer.json()["value"]
        assert answer.status_code == 200, value
        return value

    def open(self, url: str) -> None:
        self.ask("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a function's body returns."""
        return self.ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def element(self, selector: str) -> str:
        return self.ask("POST", "/element", {"using": "css selector", "value": selector})[_ELEMENT]

    def click(self, selector: str) -> None:
        self.ask("POST", f"/element/{self.element(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        """Text, in which names of `KEYS` may stand alone."""
        self.ask("POST", f"/element/{self.element(selector)}/value", {"text": KEYS.get(text, text)})

    def press(self, *names: str) -> None:
        """Keys, for whatever has the focus."""
        actions = [{"type": kind, "value": KEYS.get(name, name)} for name in names for kind in ("keyDown", "keyUp")]
        self.ask("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector)

    def count(self, selector: str) -> int:
        return self.run("return document.querySelectorAll(arguments[0]).length", selector)

    def shown(self, selector: str) -> bool:
        return self.run("return document.querySelector(arguments[0])?.checkVisibility() ?? false", selector)

    def wait(self, condition: Callable[[], object]) -> None:
        until(condition)

    def size(self, width: int, height: int, dark: bool = False) -> None:
        """Of the page, as a screen of that size; and which colours its user prefers."""
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.tool("Emulation.setDeviceMetricsOverride", **screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.tool("Emulation.setEmulatedMedia", features=[scheme])

    def tool(self, command: str, **options: Any) -> Any:
        """A command of the DevTools protocol."""
        return self.ask("POST", "/goog/cdp/execute", {"cmd": command, "params": options})

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.ask("GET", "/screenshot")))

    def complaints(self) -> list[str]:
        """What the page's console has said as an error since the last look."""
        entries = self.ask("POST", "/se/log", {"type": "browser"})
        return [each["message"] for each in entries if each["level"] == "SEVERE"]

    def requests(self) -> list[str]:
        """Addresses of all that the page has loaded."""
        script = "return performance.getEntries().filter(e => e.name.includes(':')).map(e => e.name)"
        return self.run(script)


@contextmanager
def browsing() -> Iterator[Browser]:
    """A browser with a profile of its own, which ends with the block."""
    assert CHROMIUM is not None
    assert DRIVER is not None
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    with tempfile.TemporaryDirectory() as folder:
        driver = subprocess.Popen(
            [DRIVER, "--port=0", f"--log-path={folder}/log"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "HOME": folder},
        )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{_port_of(driver)}", timeout=WAIT_S) as http:
                options = {"binary": CHROMIUM, "args": [*flags, f"--user-data-dir={folder}/profile"]}
                wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
                answer = http.post("/session", json={"capabilities": {"alwaysMatch": wanted}}).json()["value"]
                assert "sessionId" in answer, answer
                browser = Browser(http, answer["sessionId"])
                try:
                    yield browser
                finally:
                    browser.ask("DELETE", "")
        finally:
            driver.terminate()
            driver.wait(WAIT_S)
            assert driver.stdout is not None
            driver.stdout.close()


def _port_of(driver: subprocess.Popen[str]) -> int:
    assert driver.stdout is not None
    for line in driver.stdout:
        if "successfully on port" in line:
            return int(line.rstrip().rstrip(".").rsplit(" ", 1)[1])
    raise AssertionError("chromedriver did not start")
