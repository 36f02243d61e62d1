"""Ray Serve with its dynamic batching, one replica."""

from __future__ import annotations

import os

import orjson
import ray
from actor import Actor
from ray import serve
from starlette.requests import Request
from starlette.responses import Response


@serve.deployment(num_replicas=1, max_ongoing_requests=256, ray_actor_options={"num_cpus": 0})
class Policy:
    """Observation in, action out."""

    def __init__(self) -> None:
        self._actor = Actor()

    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.0)
    async def act(self, observations: list[list[float]]) -> list[list[float]]:
        return self._actor.act(observations)

    async def __call__(self, request: Request) -> Response:
        content = orjson.loads(await request.body())
        return Response(orjson.dumps({"action": await self.act(content["observation"])}), media_type="application/json")


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(os.environ["PORT"])})
    serve.run(Policy.bind(), route_prefix="/act", blocking=True)
