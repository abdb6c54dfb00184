"""Headless Chromium by the WebDriver protocol, over HTTP: no library is needed."""

import base64
import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

CHROMIUM, DRIVER = shutil.which("chromium") or shutil.which("chromium-browser"), shutil.which("chromedriver")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
]

_DOWN, _UP = ({"type": kind, "button": 0} for kind in ("pointerDown", "pointerUp"))


class Browser:
    """One window."""

    def __init__(self, width: int = 1200, height: int = 900) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._driver = subprocess.Popen(
            [str(DRIVER), f"--port={self._port}", "--log-level=OFF"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._session = ""
        try:
            self._ready()
            options = {
                "args": [*FLAGS, f"--user-data-dir={self._folder.name}", f"--window-size={width},{height}"],
                "binary": CHROMIUM,
            }
            asked = {
                "browserName": "chrome",
                "goog:chromeOptions": options,
                "goog:loggingPrefs": {"performance": "ALL", "browser": "ALL"},
            }
            started = self._call("POST", "/session", {"capabilities": {"alwaysMatch": asked}})
            self._session = f"/session/{started['sessionId']}"
            self.devtools(
                "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
            )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        try:
            if self._session:
                self._call("DELETE", self._session)
        finally:
            self._driver.terminate()
            self._driver.wait(10)
            self._folder.cleanup()

    def open(self, page: Path | str) -> None:
        self.visit(Path(page).resolve().as_uri())

    def visit(self, address: str) -> None:
        self._post("/url", url=address)
        self.painted()  # keys that come before a page is painted are lost

    def painted(self) -> None:
        """Wait until what is to be drawn now is drawn."""
        self.script("return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def script(self, code: str, *args: Any) -> Any:
        return self._post("/execute/sync", script=code, args=list(args))

    def evaluate(self, expression: str) -> Any:
        return self.script(f"return ({expression})")

    def keys(self, *keys: str) -> None:
        """Key presses into what has the focus; names of WebDriver's private code points are resolved."""
        codes = {
            "Tab": "\ue004",
            "Enter": "\ue007",
            "Space": " ",
            "ArrowLeft": "\ue012",
            "ArrowRight": "\ue014",
            "Home": "\ue011",
            "End": "\ue010",
            "Escape": "\ue00c",
        }
        actions = [{"type": kind, "value": codes.get(key, key)} for key in keys for kind in ("keyDown", "keyUp")]
        self._post("/actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def drag(self, selector: str, begin: float, end: float) -> None:
        """Press the mouse at one share of the width of an element, and let it go at another."""
        left, middle, width = self._place(selector)
        places = [round(left + share * width) for share in (begin, (begin + end) / 2, end)]
        moves = [{"type": "pointerMove", "x": x, "y": middle} for x in places]
        self._pointer([moves[0], _DOWN, *moves[1:], _UP])

    def click(self, selector: str, times: int = 1) -> None:
        """As a user does it: only then a page may copy."""
        left, middle, width = self._place(selector)
        move = {"type": "pointerMove", "x": round(left + width / 2), "y": middle}
        self._pointer([move, *[_DOWN, _UP] * times])

    def _place(self, selector: str) -> tuple[float, int, float]:
        """Left end, vertical middle and width of an element, which is brought into sight."""
        left, middle, width = self.script(
            """
            const one = document.querySelector(arguments[0]);
            one.scrollIntoView({ block: "center", behavior: "instant" });
            const { left, top, width, height } = one.getBoundingClientRect();
            return [left, Math.round(top + height / 2), width];""",
            selector,
        )
        return left, middle, width

    def _pointer(self, actions: list[dict[str, Any]]) -> None:
        mouse = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": actions}
        self._post("/actions", actions=[mouse])
        self.painted()

    def media(self, *, scheme: str = "light", media: str = "", motion: str = "no-preference") -> None:
        wanted = {"prefers-color-scheme": scheme, "prefers-reduced-motion": motion}
        features = [{"name": name, "value": value} for name, value in wanted.items()]
        self.devtools("Emulation.setEmulatedMedia", media=media, features=features)

    def resize(self, width: int, height: int = 800) -> None:
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=True
        )

    def log(self) -> list[str]:
        """What the console said."""
        return [entry["message"] for entry in self._post("/se/log", type="browser")]

    def requests(self) -> list[str]:
        """Addresses of everything that was asked for."""
        events = [json.loads(entry["message"])["message"] for entry in self._post("/se/log", type="performance")]
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]

    def screenshot(self) -> bytes:
        return base64.b64decode(self._call("GET", f"{self._session}/screenshot"))

    def devtools(self, command: str, **params: Any) -> Any:
        return self._post("/goog/cdp/execute", cmd=command, params=params)

    def _post(self, path: str, **body: Any) -> Any:
        return self._call("POST", f"{self._session}{path}", body)

    def _ready(self) -> None:
        for _ in range(200):
            try:
                if self._call("GET", "/status")["ready"]:
                    return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.05)
        raise RuntimeError("chromedriver does not answer")

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            method=method,
            headers={"Content-Type": "application/json"},
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=120) as answer:
                return json.loads(answer.read())["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(error.read().decode()[:500]) from error
