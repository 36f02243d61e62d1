"""A generator process that joins a run: ``python -m loadtest.worker HOST PORT``."""

from __future__ import annotations

import sys

from locust import log
from locust.env import Environment

from loadtest.node import LlmUser, Node, PolicyUser


def join_run(host: str, port: int) -> int:
    """Sends what the leader asks for until that one ends the run."""
    log.setup_logging("WARNING")
    environment = Environment(user_classes=[LlmUser, PolicyUser])
    try:
        runner = environment.create_worker_runner(host, port)
    except ConnectionError:
        sys.stderr.write(f"no load test reachable at {host}:{port}; start that one first, with --expect-workers\n")
        return 2
    node = Node(environment)
    runner.greenlet.join()
    node.flush()
    return 0


if __name__ == "__main__":
    sys.exit(join_run(sys.argv[1], int(sys.argv[2])))
