"""What every peer runs: the ONNX file on one thread of onnxruntime, tuned as the policy server tunes it."""

from __future__ import annotations

import os

import numpy as np
import onnxruntime


class Actor:
    """Actions of a batch; the file and its inputs' sizes come from the environment."""

    def __init__(self) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(
            os.environ["POLICY_FILE"], options, providers=["CPUExecutionProvider"]
        )
        self._inputs = [(tensor.name, tensor.shape[1]) for tensor in self._session.get_inputs()]

    def act(self, observations: list[list[float]]) -> list[list[float]]:
        """Actions for flat observations; fields follow each other in the file's order."""
        batch = np.asarray(observations, np.float32)
        feed, first = {}, 0
        for name, size in self._inputs:
            feed[name] = batch[:, first : first + size]
            first += size
        return np.asarray(self._session.run(["action"], feed)[0]).tolist()
