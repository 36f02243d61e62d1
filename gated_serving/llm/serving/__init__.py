"""Serving a gated model through vLLM's OpenAI-compatible server: ``gated-serving serve`` and its parts."""

from gated_serving.llm.serving.background import RunningServer, running_server
from gated_serving.llm.serving.errors import MachineError, ModelRefusedError, ServeError, UsageError, VllmError
from gated_serving.llm.serving.launch import serve, serve_command
from gated_serving.llm.serving.options import ServeSettings

__all__ = [
    "MachineError",
    "ModelRefusedError",
    "RunningServer",
    "ServeError",
    "ServeSettings",
    "UsageError",
    "VllmError",
    "running_server",
    "serve",
    "serve_command",
]
