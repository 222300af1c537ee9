"""What the server costs per token beside the model: a script, so that nothing but the server works.

    python overhead.py PATH_OF_LILY [STREAMS...]

A benchmark: it prints numbers and judges none. Overhead of a token is the time from the moment at which the engine has it until what it
gives is written to the socket; the server measures it itself (lily_token_to_socket_seconds, buckets of 10 us up to 200 us, so that what
is printed is a bound at most 10 us above), and what of it is left without the time in which the system wakes the task that writes
(lily_token_task_to_socket_seconds). It is measured at a pace that GPUs have (all streams get their tokens in one step, so that with
16 streams the last waits for what 15 others cost), twice: on the machine as it is, and with an idle task on each processor, which keeps
the processors from halting and gives way to whatever else wants to run. Without a pace no thread of the server sleeps for long, so that no
wake-up is measured; but the script may be faster than the writer, and then what is measured is a queue. There the processor time counts,
user and system, that a token costs, the script's own included.

Run it where nothing else runs; beside other work the tail is the scheduler's. Before each round it prints what the system itself takes
to wake a process for a byte from another one, at the same pace: a token needs one such wake-up, and can't be faster.
"""

import contextlib
import json
import os
import signal
import socket
import struct
import sys
import threading
import time

from serving import Server, script

LILY = sys.argv[1]
STREAMS = [int(number) for number in sys.argv[2:]] or [1, 16]
PACE = 200
TOKENS = 2000
METRIC = "lily_token_to_socket_seconds"
AWAKE = "lily_token_task_to_socket_seconds"
SHARES = (0.5, 0.9, 0.99)


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
    counted = {name: value - before.get(name, 0) for name, value in after.items() if name.startswith((METRIC, AWAKE))}
    return counted, server.cpu_seconds() - cpu, seconds


def bound(counted, metric, share):
    """The upper bound of the bucket that holds this share of all."""
    bucket = metric + '_bucket{le="'
    bounds = sorted((float(name[len(bucket) : -2]), count) for name, count in counted.items() if name.startswith(bucket))
    return next(bound for bound, count in bounds if count >= share * counted[metric + "_count"])


def micro(seconds):
    return f"{1e6 * seconds:.0f} us"


def quantiles(value):
    return ", ".join(f"p{100 * share:g} {micro(value(share))}" for share in SHARES)


def overhead(counted):
    def time(metric):
        mean = counted[metric + "_sum"] / counted[metric + "_count"]
        return f"mean {micro(mean)}, at most {quantiles(lambda share: bound(counted, metric, share))}"

    return f"from engine to socket {time(METRIC)}; from the woken task to socket {time(AWAKE)}"


def bare_wakes(count=1000):
    """Seconds from the sending of bytes until the process that waits for them has them, sorted."""
    here, there = socket.socketpair()
    times, reported = os.pipe()
    reader = os.fork()
    if reader == 0:
        delays = []
        for _ in range(count):
            sent = struct.unpack("d", here.recv(8))[0]
            delays.append(time.perf_counter() - sent)
        os.write(reported, struct.pack(f"{count}d", *sorted(delays)))
        os._exit(0)
    for _ in range(count):
        time.sleep(1 / PACE)
        there.send(struct.pack("d", time.perf_counter()))
    os.waitpid(reader, 0)
    delays = struct.unpack(f"{count}d", os.read(times, 8 * count))
    for end in (times, reported):
        os.close(end)
    return delays


@contextlib.contextmanager
def awake():
    """Keeps all processors from halting."""
    spinners = []
    for processor in os.sched_getaffinity(0):
        spinner = os.fork()
        if spinner == 0:
            os.sched_setaffinity(0, {processor})
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            while True:
                pass
        spinners.append(spinner)
    try:
        yield
    finally:
        for spinner in spinners:
            os.kill(spinner, signal.SIGKILL)
            os.waitpid(spinner, 0)


def paced(server):
    delays = bare_wakes()
    print(f"  a bare wake-up: {quantiles(lambda share: delays[int(share * len(delays))])}")
    for streams in STREAMS:
        counted, _, _ = run(server, streams, "paced")
        print(f"  {streams} streams, {counted[METRIC + '_count']:.0f} tokens: {overhead(counted)}")


def main():
    words = "The fox ran over the hill and saw the sea. " * (TOKENS // 11)
    slow = {"when": "paced", "output": words[: len(words) // 2], "tokens_per_second": PACE}
    file = script(slow, {"output": words})
    with Server(LILY, "--script", file, "--parallel", max(STREAMS)) as server:
        read_stream(server.port, "first")
        print(f"{PACE} tokens a second, the machine as it is")
        paced(server)
        print(f"{PACE} tokens a second, no processor halts")
        with awake():
            paced(server)
        print("without a pace")
        for streams in STREAMS:
            counted, cpu, seconds = run(server, streams, "as fast as it can")
            tokens = counted[METRIC + "_count"]
            print(f"  {streams} streams, {tokens:.0f} tokens in {seconds:.2f} s: {micro(cpu / tokens)} of processor a token, {overhead(counted)}")


if __name__ == "__main__":
    main()
