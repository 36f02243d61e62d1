"""The shipped policy solves its environment through the server."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import numpy as np
from served_policies import running_policy_server

from gated_serving.rl.environments import make_goal_environment

NUM_EPISODES = 20
FIRST_SEED = 40_000
"""Seeds that neither training nor its evaluation has seen."""


def test_fetch_reach_is_solved_over_http(tmp_path: Path) -> None:
    with running_policy_server(None, tmp_path / "log") as server:
        environment = make_goal_environment("FetchReach-v4")
        successes = 0
        for episode in range(NUM_EPISODES):
            observation, _ = environment.reset(seed=FIRST_SEED + episode)
            ended, info = False, {}
            while not ended:
                fields = {name: observation[name].tolist() for name in ("observation", "desired_goal")}
                request = urllib.request.Request(
                    f"{server.address}/v1/policies/fetch-reach/act",
                    json.dumps({"observation": fields}).encode(),
                    {"Content-Type": "application/json"},
                )
                with urllib.request.urlopen(request, timeout=30) as answer:
                    action = np.asarray(json.load(answer)["action"], np.float32)
                observation, _, terminated, truncated, info = environment.step(action)
                ended = terminated or truncated
            successes += bool(info["is_success"])
        environment.close()
    assert successes >= 0.95 * NUM_EPISODES
