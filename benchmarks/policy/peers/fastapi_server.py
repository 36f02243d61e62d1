"""A plain FastAPI handler over onnxruntime: what one writes first."""

from __future__ import annotations

import os

import uvicorn
from actor import Actor
from fastapi import FastAPI
from pydantic import BaseModel

app = FastAPI()
actor = Actor()


class Observation(BaseModel):
    """The request."""

    observation: list[float]


@app.post("/act")
async def act(request: Observation) -> dict[str, list[float]]:
    """Observation in, action out."""
    return {"action": actor.act([request.observation])[0]}


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(os.environ["PORT"]), log_level="warning", access_log=False)
