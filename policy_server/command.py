"""``gated-serving serve-policy``: settings, the supervisor, and what the user sees of them."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from policy_server.errors import StartError
from policy_server.manifest import Manifest, ManifestError, read_manifest
from policy_server.repository_scan import scan
from policy_server.settings import ServerSettings, make_settings
from policy_server.supervisor import Supervisor


def serve_policy_command(*, say: Callable[[str], None], verbose: bool = False, **options: Any) -> int:
    """Serves until Ctrl-C, SIGTERM or the end of its terminal.

    Args:
        say: Prints a line for the user.
        verbose: Log what the workers do, not only what goes wrong.
        options: Fields of ``ServerSettings``; None for what was not given.

    Returns:
        0 when it was stopped.

    Raises:
        StartError: It cannot start; carries the exit code.
    """
    batching = _given(options.pop("batching", {}))
    engine = _given({"engine": options.pop("engine", None)})
    settings = make_settings(**_given({**options, "batching": batching or None, "engine": engine or None}))
    if not settings.repository.is_dir():
        raise StartError(
            f"repository={str(settings.repository)!r}: no such folder; name one that holds NAME/VERSION/, as "
            "export-policy writes it",
            exit_code=2,
        )
    logging.basicConfig(level="INFO" if verbose else "WARNING", format="%(levelname)s %(name)s: %(message)s")
    supervisor = Supervisor(settings, log_level="INFO" if verbose else "WARNING")

    def stop(_number: int, _frame: FrameType | None) -> None:
        supervisor.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup: it shall outlive its terminal
        signal.signal(signal.SIGHUP, stop)
    say(f"loading the policies in {settings.repository} ...")
    code = supervisor.run(lambda: _announce(settings, supervisor.port, say))
    say("stopped")
    return code


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _announce(settings: ServerSettings, port: int, say: Callable[[str], None]) -> None:
    address = f"http://{settings.reachable_host}:{port}"
    say(f"serving policies at {address} (page: {address}/, API: {address}/docs); stop with Ctrl-C")
    if settings.grpc_port is not None:
        say(f"gRPC at {settings.reachable_host}:{settings.grpc_port}")
    line = example_call(settings, address)
    if line is not None:
        say("try:")
        say(f"  {line}")


def example_call(settings: ServerSettings, address: str) -> str | None:
    """One curl line that gets an action of the first policy; None if there is no policy yet."""
    for name, folders in sorted(scan(settings.repository).items()):
        try:
            manifest = read_manifest(folders[max(folders)])
        except ManifestError:
            continue
        key = " -H 'Authorization: Bearer YOUR_KEY'" if settings.api_keys else ""
        body = json.dumps({"observation": example_observation(manifest)})
        return f"curl {address}/v1/policies/{name}/act -H 'Content-Type: application/json'{key} -d '{body}'"
    return None


def example_observation(manifest: Manifest) -> dict[str, Any]:
    """An observation of the right shape, as JSON has it."""
    return {field.name: _nested(field.shape, 0 if field.dtype == "int64" else 0.0) for field in manifest.observation}


def _nested(shape: tuple[int, ...], value: float) -> Any:
    if not shape:
        return value
    return [_nested(shape[1:], value) for _ in range(shape[0])]
