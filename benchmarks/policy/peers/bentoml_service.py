"""BentoML with its adaptive batching, one worker."""

from __future__ import annotations

import bentoml
from actor import Actor


@bentoml.service(workers=1, traffic={"timeout": 30, "concurrency": 256}, logging={"access": {"enabled": False}})
class Policy:
    """Observation in, action out."""

    def __init__(self) -> None:
        self._actor = Actor()

    @bentoml.api(route="/act", batchable=True, max_batch_size=64, max_latency_ms=1000)
    def act(self, observation: list[list[float]]) -> list[list[float]]:
        return self._actor.act(observation)
