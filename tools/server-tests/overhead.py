"""What the server costs per token beside the model: a script, so that nothing but the server works.

    python overhead.py PATH_OF_LILY [STREAMS...]

A benchmark: it prints numbers and judges none. Overhead of a token is the time from the moment at which the engine has it until what it
gives is written to the socket; the server measures it itself (lily_token_to_socket_seconds, buckets of 10 us up to 200 us, so that what
is printed is a bound at most 10 us above). It is measured at a pace that GPUs have (all streams get their tokens in one step, so that with
16 streams the last waits for what 15 others cost): without a pace the script is faster than any writer, and what is measured is a queue.

Without a pace comes the processor time, user and system, that a token costs, the script's own included. Run it where nothing else runs;
beside other work the tail is the scheduler's. It therefore prints how late the operating system wakes a sleeping thread.
"""

import json
import socket
import sys
import threading
import time

from serving import Server, script

LILY = sys.argv[1]
STREAMS = [int(number) for number in sys.argv[2:]] or [1, 16]
PACE = 200
TOKENS = 2000
METRIC = "lily_token_to_socket_seconds"


def read_stream(port, question):
    """Reads one stream to its end."""
    body = json.dumps({"messages": [{"role": "user", "content": question}], "stream": True, "enable_thinking": False})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(f"{head}\r\nConnection: close\r\n\r\n{body}".encode())
        tail = b""
        while piece := connection.recv(1 << 16):
            tail = (tail + piece)[-20:]
    assert b"[DONE]" in tail, tail


def run(server, streams, question):
    """All streams together; gives what the metrics counted, the processor's seconds and all seconds."""
    readers = [threading.Thread(target=read_stream, args=(server.port, question)) for _ in range(streams)]
    before, cpu, start = server.metrics(), server.cpu_seconds(), time.perf_counter()
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    seconds = time.perf_counter() - start
    server.wait_idle()
    after = server.metrics()
    counted = {name: value - before.get(name, 0) for name, value in after.items() if name.startswith(METRIC)}
    return counted, server.cpu_seconds() - cpu, seconds


def bound(counted, share):
    """The upper bound of the bucket that holds this share of all."""
    bucket = METRIC + '_bucket{le="'
    bounds = sorted((float(name[len(bucket) : -2]), count) for name, count in counted.items() if name.startswith(bucket))
    return next(bound for bound, count in bounds if count >= share * counted[METRIC + "_count"])


def micro(seconds):
    return f"{1e6 * seconds:.0f} us"


def wake_up_delays():
    """How much longer than asked a sleep takes: half and one in a hundred, in seconds."""
    late = []
    for _ in range(500):
        start = time.perf_counter()
        time.sleep(0.002)
        late.append(time.perf_counter() - start - 0.002)
    late.sort()
    return late[250], late[495]


def main():
    half, tail = wake_up_delays()
    print(f"the system wakes a sleeper {micro(half)} too late, one in a hundred {micro(tail)}")
    words = "The fox ran over the hill and saw the sea. " * (TOKENS // 11)
    paced = {"when": "paced", "output": words[: len(words) // 2], "tokens_per_second": PACE}
    file = script(paced, {"output": words})
    with Server(LILY, "--script", file, "--parallel", max(STREAMS)) as server:
        read_stream(server.port, "first")
        for streams in STREAMS:
            counted, _, _ = run(server, streams, "paced")
            tokens = counted[METRIC + "_count"]
            mean = counted[METRIC + "_sum"] / tokens
            shares = ", ".join(f"p{100 * share:g} at most {micro(bound(counted, share))}" for share in (0.5, 0.9, 0.99))
            print(f"{streams} streams at {PACE} tokens a second: {tokens:.0f} tokens, from engine to socket mean {micro(mean)}, {shares}")
            counted, cpu, seconds = run(server, streams, "as fast as it can")
            tokens = counted[METRIC + "_count"]
            print(f"{streams} streams without a pace: {tokens:.0f} tokens in {seconds:.2f} s, {micro(cpu / tokens)} of processor a token")


if __name__ == "__main__":
    main()
