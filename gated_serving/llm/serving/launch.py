"""``gated-serving serve`` as a function: check, plan, run."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from gated_serving.llm.serving.cpu_defaults import LaunchPlan, plan_cpu
from gated_serving.llm.serving.machine import VllmBuild, claim_port, find_vllm
from gated_serving.llm.serving.model_source import DEFAULT_MODEL, ServedModel, check_model
from gated_serving.llm.serving.option_table import check_options, read_table
from gated_serving.llm.serving.options import ServeSettings, read_command
from gated_serving.llm.serving.server_process import FORK, STANDARD
from gated_serving.llm.serving.supervisor import Endpoint, Launch, Say, supervise

# Without this a small model may fill a JSON answer with blanks until its tokens run out. Of the backends that can
# leave blanks out, guidance understands the most of JSON schema.
COMPACT_JSON = ("--structured-outputs-config", '{"backend": "guidance", "disable_any_whitespace": true}')


def serve_command(
    tokens: Sequence[str],
    *,
    host: str | None,
    port: int | None,
    api_keys: Sequence[str],
    verbose: bool,
    say: Say,
) -> None:
    """Serve as a command line says, until Ctrl-C or SIGTERM.

    Args:
        tokens: MODEL and vLLM's options in the order typed.
        host: Address to listen on; None for 127.0.0.1.
        port: TCP port; None for 8000, 0 for any free one.
        api_keys: Keys of which a request must carry one.
        verbose: Whether vLLM's whole log is shown.
        say: Takes lines for the reader.

    Raises:
        ServeError: Whatever keeps the server from running; its ``exit_code`` says of which kind it is.
    """
    build = find_vllm()
    table = read_table(build.version)
    settings = read_command(
        tokens, host=host, port=port, api_keys=api_keys, verbose=verbose, default_model=DEFAULT_MODEL, table=table
    )
    if table is not None:
        check_options(settings.vllm_options, table)
    _run(settings, build, say)


def serve(settings: ServeSettings, say: Say) -> None:
    """Serve one model until Ctrl-C or SIGTERM.

    Args:
        settings: What to serve and where.
        say: Takes lines for the reader.

    Raises:
        ServeError: Whatever keeps the server from running.
    """
    _run(settings, find_vllm(), say)


def _run(settings: ServeSettings, build: VllmBuild, say: Say) -> None:
    started = time.monotonic()
    model = check_model(settings)
    unix_socket = settings.value("--uds")
    port = settings.port if unix_socket else claim_port(settings.host, settings.port)
    say(f"model: {model.name} ({model.summary})")
    plan = plan_cpu(settings, model) if build.is_cpu else LaunchPlan(environment={})
    for note in plan.notes:
        say(f"  {note}")
    say(f"starting vLLM {build.version} on the {'CPU' if build.is_cpu else 'GPU'}")
    endpoint = Endpoint(
        host=settings.host, port=port, tls=settings.has("--ssl-certfile"), unix_socket=unix_socket or None
    )
    launch = Launch(
        command=_command(settings, model, plan, port),
        environment=_environment(plan),
        endpoint=endpoint,
        verbose=settings.verbose,
    )
    name = served_name(settings, model)
    protected = bool(settings.api_keys or os.environ.get("VLLM_API_KEY"))
    supervise(launch, say, lambda: say(ready_message(endpoint, name, protected, time.monotonic() - started)))


def served_name(settings: ServeSettings, model: ServedModel) -> str:
    """What clients call the model: the name given, else the folder's."""
    return settings.value("--served-model-name") or model.name


def _command(settings: ServeSettings, model: ServedModel, plan: LaunchPlan, port: int) -> list[str]:
    mode = FORK if plan.forks_engine else STANDARD
    command = [sys.executable, "-m", "gated_serving.llm.serving.server_process", mode]
    command += ["--model", str(model.folder), "--host", settings.host, "--port", str(port)]
    if not settings.has("--served-model-name"):
        command += ["--served-model-name", model.name]
    if not settings.has_prefix("--structured-outputs"):
        command += COMPACT_JSON
    command += plan.options
    command += settings.vllm_options
    if settings.api_keys:
        command += ["--api-key", *settings.api_keys]
    return command


def _environment(plan: LaunchPlan) -> dict[str, str]:
    """The server process's environment: the user's own, and ours where the user has set nothing."""
    defaults = {"VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1", "VLLM_LOGGING_COLOR": "0"}
    return {**plan.environment, **defaults, **os.environ, **_preload(plan)}


def _preload(plan: LaunchPlan) -> dict[str, str]:
    """The one variable that is added to, where the others are only set when the user has not set them."""
    return {name: value for name, value in plan.environment.items() if name == "LD_PRELOAD"}


def ready_message(endpoint: Endpoint, name: str, protected: bool, seconds: float) -> str:
    """What is said when the server answers: its address and a line to try."""
    url = "http://localhost" if endpoint.unix_socket else endpoint.url
    socket_option = f"--unix-socket {endpoint.unix_socket} " if endpoint.unix_socket else ""
    insecure = "-k " if endpoint.tls else ""
    key = "-H 'Authorization: Bearer YOUR_KEY' " if protected else ""
    body = f'{{"model": "{name}", "prompt": "def fibonacci(n):", "max_tokens": 40, "temperature": 0}}'
    return (
        f"ready after {seconds:.1f} s at {endpoint.url} (OpenAI API under /v1); Ctrl-C stops it. Try:\n"
        f"  curl {socket_option}{insecure}{url}/v1/completions -H 'Content-Type: application/json' {key}-d '{body}'"
    )
