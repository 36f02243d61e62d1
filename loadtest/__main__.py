"""``python -m loadtest``: a process of its own, as gevent has to change sockets before anything else uses them."""

import logging

import locust  # noqa: F401  # changes the standard library to gevent's; before whatever opens sockets
from locust import log

from loadtest.cli import app

if __name__ == "__main__":
    log.setup_logging("WARNING")
    logging.getLogger("locust.runners").setLevel(logging.ERROR)  # it warns of spawning users quickly
    app(prog_name="gated-serving loadtest")
