"""mosec: its Rust front end, one or more inference processes, its dynamic batching; orjson in place of json."""

from __future__ import annotations

import os

import orjson
from actor import Actor
from mosec import Server, Worker


class Policy(Worker):
    """One inference process."""

    def __init__(self) -> None:
        self._actor = Actor()

    def deserialize(self, data: bytes) -> list[float]:
        return orjson.loads(data)["observation"]

    def serialize(self, data: list[float]) -> bytes:
        return orjson.dumps({"action": data})

    def forward(self, data: list[list[float]]) -> list[list[float]]:
        return self._actor.act(data)


if __name__ == "__main__":
    server = Server()
    server.append_worker(Policy, num=int(os.environ["NUM_PROCESSES"]), max_batch_size=64, max_wait_time=1)
    server.run()
