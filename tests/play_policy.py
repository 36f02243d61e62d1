"""Plays an exported policy in FetchReach with onnxruntime alone, and prints how often it succeeds.

Needs numpy, onnxruntime and gymnasium-robotics, nothing of this project and no torch:

    python play_policy.py NAME/VERSION [number of episodes]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.modules["torch"] = None  # an import of it, by whomever, is an error from here on

import gymnasium
import gymnasium_robotics  # noqa: F401  # registers the environments
import numpy as np
import onnxruntime

FIRST_SEED = 3_000_000


def main() -> None:
    folder, num_episodes = Path(sys.argv[1]), int(sys.argv[2])
    manifest = json.loads((folder / "policy.json").read_text())
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(folder / "policy.onnx", options, providers=["CPUExecutionProvider"])
    distribution = manifest["distribution"]
    noise = {"noise": np.zeros((1, distribution["noise_size"]), np.float32)} if distribution else {}
    environment = gymnasium.make(manifest["training"]["environment"])
    num_successes = 0
    for episode in range(num_episodes):
        observation, _ = environment.reset(seed=FIRST_SEED + episode)
        done, info = False, {}
        while not done:
            fields = {
                field["name"]: observation[field["name"]][None].astype(field["dtype"])
                for field in manifest["observation"]
            }
            [action] = session.run(["action"], fields | noise)[0]
            observation, _, terminated, truncated, info = environment.step(action)
            done = terminated or truncated
        num_successes += bool(info["is_success"])
    print(json.dumps({"num_episodes": num_episodes, "num_successes": num_successes}))


if __name__ == "__main__":
    main()
