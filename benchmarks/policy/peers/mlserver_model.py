"""MLServer with its adaptive batching; it speaks the Open Inference Protocol only."""

from __future__ import annotations

import numpy as np
from actor import Actor
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class Policy(MLModel):
    """Observation in, action out."""

    async def load(self) -> bool:
        self._actor = Actor()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        observations = NumpyCodec.decode_input(payload.inputs[0])
        actions = np.asarray(self._actor.act(observations), np.float32)
        return InferenceResponse(
            model_name=self.name, id=payload.id, outputs=[NumpyCodec.encode_output("action", actions)]
        )
