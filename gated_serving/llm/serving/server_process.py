"""The process that runs vLLM's OpenAI-compatible server; ``python -m`` starts it, the supervisor watches it.

On a CPU, vLLM imports itself and torch in three processes one after another (API, engine, worker), and in a fourth to
look at the model's class. Here they are imported once: the class is looked at in place, and the engine, which holds
the worker too, is a fork of the API process. Before the fork this process computes with one thread, because a child
cannot use the OpenMP threads of its parent.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import threading
import traceback
from typing import Any, cast

STAGE_MARK = "gated-serving stage: "
FAILURE_MARK = "gated-serving failure: "
READING_OPTIONS = "reading options"
CONFIGURING = "configuring the model"
FORK = "fork"
STANDARD = "standard"
_GRACE_S = 8.0  # from the supervisor's death to the end of the whole process group


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _watch_supervisor(gone: threading.Event) -> None:
    """End this process group when the supervisor is gone, however it went: its end of our stdin then closes."""

    def wait_for_end() -> None:
        while os.read(0, 4096):
            pass
        gone.set()
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(_GRACE_S)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    if os.getpgrp() == os.getpid():  # a group of its own, as the supervisor starts it
        threading.Thread(target=wait_for_end, name="supervisor-watch", daemon=True).start()


def _end_on_sigterm(*_: Any) -> None:
    raise KeyboardInterrupt


def _run_standard() -> None:
    """Start vLLM in its own way, with its own processes."""
    import runpy

    _say(f"{STAGE_MARK}importing vLLM")
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


def _run_forking() -> None:
    """API and engine with one set of imports."""
    _say(f"{STAGE_MARK}importing torch")
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    _say(f"{STAGE_MARK}importing vLLM")
    import uvloop
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.openai.api_server import (
        build_and_serve,
        build_async_engine_client_from_engine_args,
        setup_server,
    )
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.model_executor.models import registry
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from gated_serving.llm.serving.machine import find_vllm
    from gated_serving.llm.serving.option_table import write_table

    class ForkingEngineArgs(AsyncEngineArgs):
        """Engine settings whose config asks for a fork; vLLM's CPU platform sets "spawn" while making the config."""

        def create_engine_config(self, *args: Any, **kwargs: Any) -> Any:
            config = super().create_engine_config(*args, **kwargs)
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
            _say(f"{STAGE_MARK}starting the engine")
            return config

    listeners: list[socket.socket] = []

    def become_engine() -> None:
        signal.set_wakeup_fd(-1)  # shared with the API's event loop, which would take our signals for its own
        for listener in listeners:
            listener.close()  # the port is the API's alone
        torch.set_num_threads(num_threads)

    os.register_at_fork(after_in_child=become_engine)
    # A process of its own keeps CUDA unused in this one; a CPU has nothing to keep.
    registry._run_in_subprocess = lambda inspect: inspect()
    cli_env_setup()
    _say(f"{STAGE_MARK}{READING_OPTIONS}")
    parser = make_arg_parser(FlexibleArgumentParser(prog="gated-serving serve"))
    write_table(find_vllm().version, parser)
    arguments = cast("argparse.Namespace", parser.parse_args())
    with contextlib.suppress(ImportError):
        from vllm.logger import configure_logging_from_args

        configure_logging_from_args(arguments)
    validate_parsed_serve_args(arguments)

    async def serve() -> None:
        _say(f"{STAGE_MARK}{CONFIGURING}")
        address, listener = setup_server(arguments, reuse_port=False)
        listeners.append(listener)
        engine_args = ForkingEngineArgs.from_cli_args(arguments)
        async with build_async_engine_client_from_engine_args(engine_args) as engine:
            _say(f"{STAGE_MARK}starting the API")
            shutdown = await build_and_serve(engine, address, listener, arguments)
        try:
            await shutdown
        finally:
            listener.close()

    uvloop.run(serve())


def main() -> None:
    """``server_process MODE OPTIONS...``: run until a signal or a failure ends it."""
    mode = sys.argv.pop(1)
    supervisor_gone = threading.Event()
    _watch_supervisor(supervisor_gone)
    signal.signal(signal.SIGTERM, _end_on_sigterm)
    try:
        (_run_forking if mode == FORK else _run_standard)()
    except KeyboardInterrupt:
        sys.exit(0)
    except Exception as error:
        traceback.print_exc()
        _say(f"{FAILURE_MARK}{type(error).__name__}: {error}")
        sys.exit(1)
    finally:
        if supervisor_gone.is_set():  # nobody else is left to end what this process started
            os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
