"""Tells from CHECKPOINT what kind of source it is, and has it read."""

from __future__ import annotations

import importlib.util
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

from policy_server.export.errors import ExportError, UnreadableSourceError
from policy_server.export.policy import TrainedPolicy

KINDS = (
    "a checkpoint folder of train-rl (such as RUN/checkpoints/best), a Stable-Baselines3 .zip, an rsl_rl .pt, or "
    "package.module:factory for any torch.nn.Module"
)

_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_MODULE_OPTIONS = frozenset({"observation", "action_low", "action_high"})
_SB3_OPTIONS = frozenset({"vec_normalize", "trust_pickle"})


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """What some kinds of source do not say themselves.

    Attributes:
        vec_normalize: Stable-Baselines3: the file VecNormalize.save wrote.
        trust_pickle: Stable-Baselines3: run whatever the file holds, for classes of the user's own.
        config: rsl_rl: the run's configuration, YAML or JSON.
        observation: rsl_rl and modules: ``name=size`` or ``name=2x3`` of each field in order.
        action_low: rsl_rl and modules: lower bounds, one number or one a value.
        action_high: Upper bounds.
        control_period_s: Seconds between two actions, over what the source says.
        environment: The environment's id, over what the source says.
    """

    vec_normalize: Path | None = None
    trust_pickle: bool = False
    config: Path | None = None
    observation: tuple[str, ...] = ()
    action_low: str | None = None
    action_high: str | None = None
    control_period_s: float | None = None
    environment: str | None = None


def read_source(source: str, options: SourceOptions) -> TrainedPolicy:
    """Reads any kind of source.

    Raises:
        UnreadableSourceError: It is none of the known kinds, or damaged.
        ExportError: An option does not fit the kind, or the policy cannot be exported.
    """
    period = options.control_period_s
    if period is not None and not (math.isfinite(period) and period > 0):
        raise ExportError(f"--control-period {period}: must be a number of seconds above 0")
    policy = _read(source, options)
    if options.control_period_s is not None:
        policy = replace(policy, control_period_s=options.control_period_s)
    if options.environment is not None:
        training = policy.training.model_copy(update={"environment": options.environment, "environment_kwargs": {}})
        policy = replace(policy, training=training)
    return policy


def _read(source: str, options: SourceOptions) -> TrainedPolicy:
    path = Path(source)
    if path.is_dir():
        _refuse(options, _MODULE_OPTIONS | _SB3_OPTIONS | {"config"}, "a checkpoint folder")
        from policy_server.export.residual_actor import read_residual_actor

        best = path / "checkpoints" / "best"  # a run's own folder means its best checkpoint
        return read_residual_actor(best if best.is_dir() else path)
    if path.is_file() and path.suffix == ".zip":
        _refuse(options, _MODULE_OPTIONS | {"config"}, "a Stable-Baselines3 model")
        _require("stable_baselines3", "stable-baselines3", source)
        from policy_server.export.stable_baselines3 import read_stable_baselines3

        return read_stable_baselines3(path, vec_normalize=options.vec_normalize, trust_pickle=options.trust_pickle)
    if path.is_file() and path.suffix == ".pt":
        _refuse(options, _SB3_OPTIONS, "an rsl_rl model")
        _require("rsl_rl", "rsl-rl-lib", source)
        from policy_server.export.rsl_rl import read_rsl_rl

        return read_rsl_rl(
            path,
            config=options.config,
            observation=options.observation,
            low=options.action_low,
            high=options.action_high,
        )
    if path.exists():
        raise UnreadableSourceError(f"{source}: is no policy that can be exported; give {KINDS}")
    if _IMPORT_PATH.fullmatch(source):
        _refuse(options, _SB3_OPTIONS | {"config"}, "a module")
        from policy_server.export.torch_module import read_torch_module

        return read_torch_module(
            source, observation=options.observation, low=options.action_low, high=options.action_high
        )
    raise UnreadableSourceError(f"{source}: no such file or folder; give {KINDS}")


def _require(module: str, package: str, source: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ExportError(f"{source}: needs the package {package}, which is not installed: pip install {package}")


def _refuse(options: SourceOptions, names: frozenset[str], kind: str) -> None:
    """An option that a kind of source has no use for is an error: ignoring it would surprise."""
    for name in sorted(names):
        if getattr(options, name):
            raise ExportError(f"--{name.replace('_', '-')} is not for {kind}; leave it out")
