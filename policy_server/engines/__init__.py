"""What runs a policy: one protocol, and an engine for each way of running it."""

from policy_server.engines.base import Engine, EngineError
from policy_server.engines.opening import check_engine, open_engine

__all__ = ["Engine", "EngineError", "check_engine", "open_engine"]
