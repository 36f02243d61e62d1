"""A generator process that joins a run: ``python -m loadtest.worker HOST PORT``."""

from __future__ import annotations

import logging
import os
import sys

import gevent
from gevent.socket import wait_read
from locust import log
from locust.env import Environment

from loadtest.node import LlmUser, Node, PolicyUser


def join_run(host: str, port: int, *, lifeline: bool = False) -> int:
    """Sends what the leader asks for until that one ends the run.

    Args:
        host: Where the leader listens.
        port: Its port.
        lifeline: Whether standard input ends with the leader; a killed one cannot say that it does.

    Returns:
        The exit code.
    """
    log.setup_logging("WARNING")
    logging.getLogger("locust.runners").addFilter(_is_no_early_order)
    environment = Environment(user_classes=[LlmUser, PolicyUser])
    try:
        runner = environment.create_worker_runner(host, port)
    except ConnectionError:
        sys.stderr.write(f"no load test reachable at {host}:{port}; start that one first, with --expect-workers\n")
        return 2
    if lifeline:
        gevent.spawn(_end_with_the_leader)
    node = Node(environment)
    runner.greenlet.join()
    node.flush()
    return 0


def _is_no_early_order(record: logging.LogRecord) -> bool:
    """An order that comes before this process listens is given again; locust warns of it."""
    return "Unknown message type received: loadtest_" not in record.getMessage()


def _end_with_the_leader() -> None:
    wait_read(sys.stdin.fileno())  # nothing is ever written to it
    os._exit(1)


if __name__ == "__main__":
    sys.exit(join_run(sys.argv[1], int(sys.argv[2]), lifeline=True))
