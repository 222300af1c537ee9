"""Sessions on the disk survive a server that is killed while it writes them, and files that are damaged.

    python crash.py PATH_OF_LILY [SEED]

Whatever is on the disk, a server that starts there answers like one that starts cold.
"""

import os
import random
import resource
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

from serving import Server, run

LILY = sys.argv[1]
SEED = int(sys.argv[2]) if len(sys.argv) > 2 else 1
ROUNDS = 6
# Room for one or two sessions: almost every prompt sends another to the disk.
MEMORY = 8_000_000
# Sessions of fewer than 256 tokens are not stored.
STORIES = [f"{who} went out and came home again. " * 90 for who in ("The fox", "A cat", "My friend", "One boat")]


def options(folder):
    return ["--cache-dir", folder, "--cache-memory", MEMORY, "--parallel", 1]


def body(story):
    return {"prompt": story + "Then", "max_tokens": 16, "temperature": 0}


def text_of(server, story):
    answer = server.answer("/v1/completions", body(story))
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def cold():
    with Server(LILY) as server:
        return {story: text_of(server, story)[0] for story in STORIES}


def stored(folder):
    return sorted(Path(folder).rglob("*.session"))


def discarded(server):
    return [line for line in server.log if "a stored session is discarded" in line]


def check(folder, expected):
    """A server that starts in `folder` answers as a cold one. Gives the tokens that it found there, and its warnings."""
    with Server(LILY, *options(folder)) as server:
        assert not list(Path(folder).rglob("*.unfinished")), "an unfinished file was kept"
        found = 0
        for story in STORIES:
            text, cached = text_of(server, story)
            assert text == expected[story], f"{story[:20]}: {text!r}, but cold {expected[story]!r}"
            found += cached
        return found, discarded(server)


def killed_while_writing(expected):
    """By turns with kill -9 at some moment, and by the system inside a write, when a file reaches some length."""
    random.seed(SEED)
    unfinished = 0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(ROUNDS):
            server = Server(LILY, *options(folder))

            def ask():
                try:
                    while True:
                        text_of(server, f"{random.random()} {random.choice(STORIES)}")
                except Exception:
                    pass  # It was killed.

            asking = threading.Thread(target=ask)
            asking.start()
            if number % 2:
                bytes_written = random.randrange(1, 1_000_000)
                resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (bytes_written, bytes_written))
                server.process.wait(120)
            else:
                time.sleep(random.uniform(0.5, 4))
            server.kill()
            asking.join()
            unfinished += len(list(Path(folder).rglob("*.unfinished")))
            _, warnings = check(folder, expected)
            assert all("not written to its end" in line for line in warnings), warnings
    print(f"        {ROUNDS} kills left {unfinished} unfinished files")
    assert unfinished >= ROUNDS // 2


def a_restart_finds_what_was_stored(expected):
    with tempfile.TemporaryDirectory() as folder:
        check(folder, expected)
        assert stored(folder)
        found, warnings = check(folder, expected)
        assert found > 0 and not warnings, (found, warnings)


def damaged_files_are_discarded(expected):
    random.seed(SEED)

    def truncate(data):
        return data[: random.randrange(len(data))]

    def flip(data):
        at = random.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]

    def flip_in_header(data):
        at = random.randrange(64)
        return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]

    with tempfile.TemporaryDirectory() as whole:
        check(whole, expected)
        names = [file.relative_to(whole) for file in stored(whole)]
        for damage in (truncate, flip, flip_in_header, lambda data: b"", lambda data: os.urandom(len(data))):
            with tempfile.TemporaryDirectory() as folder:
                shutil.copytree(whole, folder, dirs_exist_ok=True)
                for name in names:
                    file = Path(folder, name)
                    file.write_bytes(damage(file.read_bytes()))
                Path(folder, names[0]).with_suffix(".unfinished").write_bytes(b"lily session 1\n")
                found, warnings = check(folder, expected)
                assert found == 0, f"{damage.__name__}: {found} tokens of damaged files were used"
                # A file whose prompt was found in memory first is not looked at.
                assert len(warnings) > 1, f"{damage.__name__}: {warnings}"


if __name__ == "__main__":
    expected = cold()
    tests = (a_restart_finds_what_was_stored, killed_while_writing, damaged_files_are_discarded)
    run([(f.__name__, lambda f=f: f(expected)) for f in tests])
