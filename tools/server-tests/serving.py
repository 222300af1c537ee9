"""What the tests of the server share: a `lily serve` of their own, plain requests to it, and a runner."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback

START_SECONDS = 60  # A debug build on a busy machine loads the demo model in a few.


class Server:
    """`lily serve`, on a free port if none is given, ended with the block."""

    def __init__(self, lily, *options, port=0):
        self.log = []
        command = [lily, "serve", "--port", *map(str, (port, *options))]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.address = None
        ready = threading.Event()
        threading.Thread(target=self._read_log, args=(ready,), daemon=True).start()
        if not ready.wait(START_SECONDS) or self.address is None:
            self.process.kill()
            raise RuntimeError(f"{' '.join(command)} did not start:\n" + "".join(self.log))
        self.port = int(self.address.rsplit(":", 1)[1])

    def _read_log(self, ready):
        for line in self.process.stderr:
            self.log.append(line)
            found = re.search(r"http://(\S+) is ready", line)
            if found:
                self.address = found[1]
                ready.set()
        ready.set()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        """As a service manager does; whoever does not go in time is killed, and that is an error."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                raise

    def kill(self):
        self.process.kill()
        self.process.wait()

    @property
    def url(self):
        return f"http://{self.address}"

    def request(self, method, path, body=None, headers=None, timeout=120):
        """Status, headers and body of a whole answer."""
        return request(self.port, method, path, body, headers, timeout)

    def answer(self, path, body, headers=None):
        """The JSON of an answer that has to be there."""
        status, _, text = self.request("POST", path, body, headers)
        assert status == 200, f"{path}: {status} {text}"
        return json.loads(text)

    def metrics(self):
        """Values by name, labels included."""
        lines = self.request("GET", "/metrics")[2].splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    def wait_until(self, what, holds, seconds=30):
        """Until `holds` of the metrics."""
        deadline = time.monotonic() + seconds
        while not holds(metrics := self.metrics()):
            assert time.monotonic() < deadline, f"not {what} after {seconds} s: {metrics}"
            time.sleep(0.02)

    def wait_idle(self, seconds=30):
        def idle(metrics):
            return metrics["lily_requests_running"] == metrics["lily_requests_waiting"] == 0

        self.wait_until("idle", idle, seconds)

    def resident_bytes(self):
        return 1024 * int(re.search(r"VmRSS:\s*(\d+)", open(f"/proc/{self.process.pid}/status").read())[1])

    def cpu_seconds(self):
        times = open(f"/proc/{self.process.pid}/stat").read().rsplit(")", 1)[1].split()
        return (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")


def request(port, method, path, body=None, headers=None, timeout=120):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
        response = connection.getresponse()
        return response.status, response.headers, response.read().decode()
    finally:
        connection.close()


def script(*lines):
    """A file for `--script`."""
    file = tempfile.NamedTemporaryFile("w", suffix=".jsonl", delete=False)
    with file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return file.name


def run(tests):
    """Runs (name, function) pairs; ends the process with what they gave."""
    failed = 0
    for name, test in tests:
        start = time.monotonic()
        try:
            test()
            print(f"ok      {name} ({time.monotonic() - start:.1f} s)", flush=True)
        except Exception:
            failed += 1
            print(f"FAILED  {name}\n{traceback.format_exc()}", flush=True)
    if failed:
        sys.exit(f"{failed} failed")
