"""Two replicas behind HAProxy with the configuration of docs/scale-out.md: sessions stay together, and a replica that goes takes
no request with it.

    python scaleout.py PATH_OF_LILY
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time

from serving import Server, request, run, script

LILY = sys.argv[1]
CONFIGURATION = os.path.join(os.path.dirname(os.path.abspath(__file__)), "haproxy.cfg")
CLIENTS = 12
PATH = "/v1/chat/completions"
ANSWER = "The fox ran over the hill and saw the sea, and it went home and slept well that night."


def replica(name, port=0):
    paced = script({"output": ANSWER}, {"tokens_per_second": 60})
    return Server(LILY, "--script", paced, "--name", name, "--parallel", 8, port=port)


@contextlib.contextmanager
def cluster():
    """Two replicas by name, and the port of HAProxy before them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        front = free.getsockname()[1]
    with contextlib.ExitStack() as stack:
        replicas = {name: stack.enter_context(replica(name)) for name in ("one", "two")}
        addresses = {f"REPLICA_{name.upper()}": replica.address for name, replica in replicas.items()}
        environment = {**os.environ, **addresses, "FRONT": f"127.0.0.1:{front}"}
        haproxy = subprocess.Popen(["haproxy", "-db", "-q", "-f", CONFIGURATION], env=environment)
        try:
            wait_for(lambda: request(front, "GET", "/ready")[0] == 200)
            yield replicas, front
        finally:
            haproxy.terminate()
            haproxy.wait()
            for server in replicas.values():
                server.stop()


def wait_for(holds, seconds=20):
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if holds():
                return
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)


def ask(port, stream, headers=None, **more):
    """Asks for an answer, checks that it is whole, and gives the name of the replica that gave it."""
    body = {"messages": [{"role": "user", "content": "Tell me"}], "stream": stream, "enable_thinking": False, **more}
    status, _, text = request(port, "POST", PATH, body, headers)
    assert status == 200, f"{status} {text}"
    if not stream:
        answer = json.loads(text)
        assert answer["choices"][0]["message"]["content"] == ANSWER, text
        return answer["model"]
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]", events[-1:]
    chunks = [json.loads(event) for event in events[:-1]]
    content = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert content == ANSWER, content
    return chunks[0]["model"]


class Load:
    """Clients that ask again and again, until the end of the block."""

    def __init__(self, port):
        self.port, self.stop, self.answers, self.failures = port, threading.Event(), [], []
        self.clients = [threading.Thread(target=self.work, args=(number,)) for number in range(CLIENTS)]

    def work(self, number):
        while not self.stop.is_set():
            try:
                # Every third without a session.
                headers = {"x-session-affinity": f"session {number}"} if number % 3 else None
                self.answers.append(ask(self.port, number % 2 == 0, headers))
            except Exception as error:
                self.failures.append(f"{type(error).__name__}: {error}")

    def __enter__(self):
        for client in self.clients:
            client.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        for client in self.clients:
            client.join()

    def wait_for_more(self, name, count=5):
        before = self.answers.count(name)
        wait_for(lambda: self.answers.count(name) >= before + count)


def a_session_stays_on_its_replica():
    with cluster() as (_, front):
        used = set()
        for number in range(5):
            headers, field = {"x-session-affinity": f"s{number}"}, {"prompt_cache_key": f"k{number}"}
            for ways in [(headers, {}), (None, field), ({"x-claude-code-session-id": f"c{number}"}, {})]:
                names = {ask(front, stream, ways[0], **ways[1]) for stream in (True, False)}
                assert len(names) == 1, (ways, names)
                used |= names
        assert used == {"one", "two"}, used


def a_drained_replica_loses_nothing():
    with cluster() as (replicas, front):
        with Load(front) as load:
            load.wait_for_more("one")
            load.wait_for_more("two")
            one = replicas["one"]
            one.request("POST", "/drain")
            wait_for(lambda: json.loads(one.request("POST", "/drain")[2])["in_progress"] == 0, 60)
            one.kill()
            load.wait_for_more("two", 3 * CLIENTS)
            # As a rolling update does, at the same address.
            replicas["one"] = replica("one", one.port)
            load.wait_for_more("one")
        print(f"        {len(load.answers)} answers")
        assert not load.failures, f"{len(load.failures)} lost:\n" + "\n".join(load.failures[:5])


def a_killed_replica_loses_only_streams_that_had_begun():
    with cluster() as (replicas, front):
        with Load(front) as load:
            load.wait_for_more("one")
            replicas["one"].kill()
            load.wait_for_more("two", 3 * CLIENTS)
        print(f"        {len(load.answers)} answers, {len(load.failures)} streams cut")
        # Those that stream are every second client, and one stream each was open.
        assert len(load.failures) <= CLIENTS // 2, load.failures
        assert not any(failure.startswith("AssertionError: 50") for failure in load.failures), load.failures


if __name__ == "__main__":
    tests = (
        a_session_stays_on_its_replica,
        a_drained_replica_loses_nothing,
        a_killed_replica_loses_only_streams_that_had_begun,
    )
    run([(f.__name__, f) for f in tests])
