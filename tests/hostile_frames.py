"""Malformed bodies and frames for the policy server, the same for the same seed, and the sending of them."""

from __future__ import annotations

import http.client
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from policy_server.wire_msgpack import pack

_ODD_JSON = [
    "null", "-1", "1e999", "NaN", "[]", "{}", '""', "true", "[[[[]]]]", '"FP32"', "9" * 40, "0.1", '"\\ud800"',
    '{"a":' * 50,
]  # fmt: skip


def good_infer_body() -> tuple[bytes, int]:
    """A binary infer request for the shipped policy, and the length of its JSON."""
    arrays = {"observation": np.zeros((2, 10), np.float32), "desired_goal": np.zeros((2, 3), np.float32)}
    inputs = [
        {
            "name": name,
            "shape": list(values.shape),
            "datatype": "FP32",
            "parameters": {"binary_data_size": values.nbytes},
        }
        for name, values in arrays.items()
    ]
    header = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    return header + b"".join(values.tobytes() for values in arrays.values()), len(header)


def broken_infer_bodies(number: int, seed: int) -> Iterator[tuple[bytes, str]]:
    """Bodies and their header lengths."""
    chosen = random.Random(seed)
    good, length = good_infer_body()
    for _ in range(number):
        body, announced = bytearray(good), str(length)
        kind = chosen.randrange(6)
        if kind == 0:
            body = body[: chosen.randrange(len(body))]
        elif kind == 1:
            announced = chosen.choice(
                ["", "-1", "0", "abc", "9" * 30, str(length + chosen.randint(-9, 9)), "1e3", " 5"]
            )
        elif kind == 2:  # a value of the JSON becomes another
            text = good[:length].decode()
            places = [index for index, letter in enumerate(text) if letter in ":,["]
            place = chosen.choice(places) + 1
            text = (
                text[:place]
                + chosen.choice(_ODD_JSON)
                + text[place:].partition(",")[1]
                + text[place:].partition(",")[2]
            )
            body, announced = (
                bytearray(text.encode("utf-8", "surrogatepass") + good[length:]),
                str(len(text.encode("utf-8", "surrogatepass"))),
            )
        elif kind == 3:  # not finite
            for _ in range(chosen.randint(1, 4)):
                place = length + 4 * chosen.randrange((len(good) - length) // 4)
                body[place : place + 4] = np.float32(chosen.choice([np.nan, np.inf, -np.inf, 3e38])).tobytes()
        elif kind == 4:
            body += bytes(chosen.randrange(256) for _ in range(chosen.randint(1, 50)))
        for _ in range(chosen.randint(0, 6)):
            if body:
                body[chosen.randrange(len(body))] = chosen.randrange(256)
        yield bytes(body), announced


def broken_frames(number: int, seed: int) -> Iterator[bytes]:
    """msgpack frames."""
    chosen = random.Random(seed)
    good = pack({"observation": np.zeros(10, np.float32), "desired_goal": np.zeros(3, np.float32)})
    for _ in range(number):
        frame = bytearray(good)
        kind = chosen.randrange(4)
        if kind == 0:
            frame = frame[: chosen.randrange(len(frame))]
        elif kind == 1:
            frame = bytearray(chosen.randrange(256) for _ in range(chosen.randint(0, 200)))
        elif kind == 2:
            frame = bytearray(
                pack({"observation": [chosen.choice([1e39, 0.0, -1.0, 2**63]) for _ in range(chosen.randint(0, 12))]})
            )
        for _ in range(chosen.randint(1, 6)):
            if frame:
                frame[chosen.randrange(len(frame))] = chosen.randrange(256)
        yield bytes(frame)


def send_bodies(port: int, path: str, requests: Iterable[tuple[bytes, dict[str, str]]]) -> Counter[str]:
    """Posts bodies with their headers over one connection; how often each status was answered."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    counts: Counter[str] = Counter()
    for body, headers in requests:
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        answer.read()
        counts[str(answer.status)] += 1
    connection.close()
    return counts


def send_infer_bodies(port: int, number: int, seed: int) -> Counter[str]:
    """Broken binary tensors to the shipped policy."""
    headers = {"Content-Type": "application/octet-stream"}
    bodies = broken_infer_bodies(number, seed)
    requests = ((body, {**headers, "Inference-Header-Content-Length": length}) for body, length in bodies)
    return send_bodies(port, "/v2/models/fetch-reach/infer", requests)


def send_frames(port: int, frames: Iterable[bytes]) -> Counter[str]:
    """Sends frames over a WebSocket, and over a new one when it was closed.

    Returns:
        How often each kind of answer came: ``action``, the code of an error, or ``closed``.
    """
    counts: Counter[str] = Counter()
    socket: Any = None
    for frame in frames:
        if socket is None:
            socket = connect(f"ws://127.0.0.1:{port}/", compression=None)
            socket.recv()
        try:
            socket.send(frame)
            answer = socket.recv(30)
        except ConnectionClosed:
            counts["closed"] += 1
            socket = None
            continue
        counts[answer.partition(":")[0] if isinstance(answer, str) else "action"] += 1
    if socket is not None:
        socket.close()
    return counts
