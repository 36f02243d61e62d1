"""LitServe with its dynamic batching."""

from __future__ import annotations

import os

import litserve
from actor import Actor


class Policy(litserve.LitAPI):
    """Observation in, action out."""

    def setup(self, device: str) -> None:
        self._actor = Actor()

    def decode_request(self, request: dict) -> list[float]:
        return request["observation"]

    def batch(self, inputs: list[list[float]]) -> list[list[float]]:
        return list(inputs)

    def predict(self, batch: list[list[float]]) -> list[list[float]]:
        return self._actor.act(batch)

    def unbatch(self, output: list[list[float]]) -> list[list[float]]:
        return output

    def encode_response(self, output: list[float]) -> dict:
        return {"action": output}


if __name__ == "__main__":
    api = Policy(max_batch_size=64, batch_timeout=0.001, api_path="/act")
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1)
    server.run(
        host="127.0.0.1", port=int(os.environ["PORT"]), generate_client_file=False, log_level="error", access_log=False
    )
