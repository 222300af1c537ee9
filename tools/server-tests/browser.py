"""Chromium without a window, driven by the DevTools protocol over a pipe; needs nothing but the standard library."""

import base64
import json
import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time

NAMES = ["chromium", "chromium-browser", "google-chrome"]


class Browser:
    """A browser with one tab. `requests` are the JSON bodies that the tab sent, `errors` what its console complains of."""

    def __init__(self):
        program = next((path for path in map(shutil.which, NAMES) if path), None)
        if program is None:
            raise SystemExit(f"found none of {', '.join(NAMES)}; on Debian: apt-get install chromium")
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        command_in, self.commands = os.pipe()
        self.answers, answers_out = os.pipe()
        # The browser reads commands from descriptor 3 and writes answers to 4.
        line = f'exec "$@" 3<&{command_in} 4>&{answers_out}'
        flags = ["--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage"]
        # Chromium has no sandbox for root, whom containers of a CI have.
        flags += ["--no-sandbox"] if os.geteuid() == 0 else []
        self.process = subprocess.Popen(
            ["bash", "-c", line, "browser", program, *flags, f"--user-data-dir={self.folder.name}", "about:blank"],
            pass_fds=[command_in, answers_out], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(command_in)
        os.close(answers_out)
        self.requests, self.errors, self.replies, self.last, self.session = [], [], queue.Queue(), 0, None
        threading.Thread(target=self._read, daemon=True).start()
        tab = next(t for t in self.send("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self.session = self.send("Target.attachToTarget", targetId=tab["targetId"], flatten=True)["sessionId"]
        for domain in ["Page", "Runtime", "Network", "Log"]:
            self.send(f"{domain}.enable")

    def _read(self):
        rest = b""
        while piece := os.read(self.answers, 1 << 16):
            *whole, rest = (rest + piece).split(b"\0")
            for message in map(json.loads, whole):
                self._take(message)

    def _take(self, message):
        params = message.get("params", {})
        match message.get("method"):
            case None:
                self.replies.put(message)
            case "Network.requestWillBeSent" if "postData" in params["request"]:
                self.requests.append(json.loads(params["request"]["postData"]))
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "assert"):
                self.errors.append(json.dumps(params["args"]))
            # What the network refuses is part of some tests.
            case "Log.entryAdded" if params["entry"]["level"] == "error" and params["entry"]["source"] != "network":
                self.errors.append(params["entry"]["text"])

    def send(self, method, **params):
        self.last += 1
        command = {"id": self.last, "method": method, "params": params}
        if self.session:
            command["sessionId"] = self.session
        os.write(self.commands, json.dumps(command).encode() + b"\0")
        while (reply := self.replies.get(timeout=30))["id"] != self.last:
            pass
        if "error" in reply:
            raise RuntimeError(f"{method}: {reply['error']}")
        return reply["result"]

    def open(self, url):
        self.send("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def get(self, expression):
        """The value of a JavaScript expression, awaited."""
        reply = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in reply:
            details = reply["exceptionDetails"]
            raise RuntimeError(f"{expression[:500]}: {str(details.get('exception', {}).get('description', details))[:500]}")
        return reply["result"].get("value")

    def until(self, expression, seconds=15):
        """Waits until an expression is true or something."""
        end = time.monotonic() + seconds
        while True:
            try:
                if self.get(f"Boolean({expression})"):
                    return
            except RuntimeError as error:
                # Between two pages there is none.
                if time.monotonic() > end:
                    raise error
            if time.monotonic() > end:
                raise AssertionError(f"not within {seconds} s: {expression}\n{self.get('document.body.innerText')}")
            time.sleep(0.02)

    def click(self, selector):
        self.get(f"document.querySelector({json.dumps(selector)}).click()")

    def write(self, selector, text):
        """Replaces what a field holds, as typing does."""
        self.get(f"{{ const field = document.querySelector({json.dumps(selector)}); field.focus(); field.select(); }}")
        if text:
            self.send("Input.insertText", text=text)
        else:
            self.press("Delete")

    def press(self, key, modifiers=0):
        text = {"Enter": "\r"}.get(key, "")
        code = {"Enter": 13, "Escape": 27, "Delete": 46, "Tab": 9}[key]
        for kind in ["keyDown", "keyUp"]:
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, text=text if kind == "keyDown" else "",
                      windowsVirtualKeyCode=code, modifiers=modifiers)

    def look(self, width, height, theme):
        """Sets the size of the window and the theme; below 600 it is a phone."""
        is_phone = width < 600
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1 + is_phone, mobile=is_phone)
        self.send("Emulation.setTouchEmulationEnabled", enabled=is_phone)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    def picture(self, path):
        with open(path, "wb") as file:
            file.write(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def close(self):
        try:
            self.session = None
            self.send("Browser.close")
            self.process.wait(10)
        except (RuntimeError, OSError, queue.Empty, subprocess.TimeoutExpired):
            self.process.kill()
        self.folder.cleanup()
