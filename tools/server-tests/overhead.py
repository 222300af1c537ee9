"""What the server costs per token beside the model: a script without a pace, so that nothing but the server works.

    python overhead.py PATH_OF_LILY [STREAMS...]

A benchmark: it prints numbers and judges none. Two clocks: the server's own histogram of the time between tokens (buckets of a factor 2,
so its p99 is an upper bound), and a reader of the raw socket that notes when each event arrives; events that arrive in one read came
together, and count as no time apart. CPU is the server's, user and system, per token.
"""

import json
import socket
import sys
import threading
import time

from serving import Server, script

LILY = sys.argv[1]
STREAMS = [int(number) for number in sys.argv[2:]] or [1, 16]
TOKENS = 2000
METRIC = "lily_between_tokens_seconds"


def read_stream(port, gaps):
    """Reads one stream; adds the times between its events."""
    body = json.dumps({"messages": [{"role": "user", "content": "Go"}], "stream": True, "enable_thinking": False})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(f"{head}\r\nConnection: close\r\n\r\n{body}".encode())
        last, tail = None, b""
        while piece := connection.recv(1 << 20):
            now = time.perf_counter()
            events = (tail + piece).count(b"data: {") - tail.count(b"data: {")
            tail = piece[-6:]
            if events and last is not None:
                gaps.append(now - last)
                gaps.extend([0.0] * (events - 1))
            last = now if events else last


def server_p99(before, after):
    """The upper bound of the bucket that holds the 99th percentile of what came between."""
    bucket = METRIC + '_bucket{le="'
    counts = {name: value - before[name] for name, value in after.items() if name.startswith(bucket)}
    bounds = sorted((float(name[len(bucket) : -2]), count) for name, count in counts.items())
    return next(bound for bound, count in bounds if count >= 0.99 * bounds[-1][1])


def main():
    words = "The fox ran over the hill and saw the sea. " * (TOKENS // 11)
    with Server(LILY, "--script", script({"output": words}), "--parallel", max(STREAMS)) as server:
        read_stream(server.port, [])
        for streams in STREAMS:
            gaps = [[] for _ in range(streams)]
            readers = [threading.Thread(target=read_stream, args=(server.port, own)) for own in gaps]
            before, cpu, start = server.metrics(), server.cpu_seconds(), time.perf_counter()
            for reader in readers:
                reader.start()
            for reader in readers:
                reader.join()
            seconds = time.perf_counter() - start
            server.wait_idle()
            cpu, after = server.cpu_seconds() - cpu, server.metrics()
            tokens = after[METRIC + "_count"] - before[METRIC + "_count"]
            mean = (after[METRIC + "_sum"] - before[METRIC + "_sum"]) / tokens
            seen = sorted(gap for own in gaps for gap in own)
            micro = lambda seconds: f"{1e6 * seconds:.0f} us"
            print(
                f"{streams} streams, {tokens:.0f} tokens in {seconds:.2f} s: {micro(cpu / tokens)} of CPU a token; "
                f"between tokens of a stream at the server mean {micro(mean)}, p99 at most {micro(server_p99(before, after))}; "
                f"at the reader p50 {micro(seen[len(seen) // 2])}, p99 {micro(seen[int(0.99 * len(seen))])}"
            )


if __name__ == "__main__":
    main()
