"""A Stable-Baselines3 model as a policy: PPO, A2C, SAC, TD3, DDPG and DQN, with VecNormalize's statistics inside.

The network is the library's own; what surrounds it (flattening, normalising, squashing, scaling, clipping, choosing) is
written here so that it can be traced and run in float64. The library's own ``predict`` is compared with it.

Legend: B batch, A action values, C choices in all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from policy_server.export.actor_module import (
    ContinuousHead,
    DiscreteHead,
    Normalizer,
    check_weights,
    float64_reference,
)
from policy_server.export.errors import ExportError, UnreadableSourceError
from policy_server.export.policy import Arrays, TrainedPolicy, inner_bounds
from policy_server.export.stable_baselines3_file import SavedModel, read_saved_model, read_vec_normalize
from policy_server.export.torch_module import trace
from policy_server.manifest import (
    RESERVED_NAMES,
    ActionSpace,
    Architecture,
    Distribution,
    ObservationField,
    Training,
    sha256,
)

SINGLE_FIELD = "observation"
"""What an observation that is no dictionary is called."""

_SAC_LOG_STD = (-20.0, 2.0)


@dataclass(frozen=True)
class _Actor:
    """What the network's output means."""

    squash: str | None
    distribution: str | None
    parameter_names: tuple[str, ...]


def read_stable_baselines3(
    path: Path, *, vec_normalize: Path | None = None, trust_pickle: bool = False
) -> TrainedPolicy:
    """Reads a model that ``model.save`` wrote.

    Args:
        path: The ``.zip``.
        vec_normalize: What ``VecNormalize.save`` wrote, if the model was trained behind one.
        trust_pickle: Also load classes that are not the library's own: this runs the file's code.

    Raises:
        UnreadableSourceError: The file is damaged, or of none of these algorithms.
        ExportError: The policy is recurrent or sees images, uses generalised state-dependent exploration, or needs
            statistics that were not given.
    """
    saved = read_saved_model(path, trust_pickle=trust_pickle)
    normalizer = read_vec_normalize(vec_normalize, saved, trust_pickle=trust_pickle)
    fields = _fields(saved)
    space = _action_space(saved)
    num_parameters = check_weights(saved.policy, str(path))
    actor = _describe_actor(saved, space)
    network = _Network(saved, fields, normalizer)
    head: nn.Module = DiscreteHead(space) if space.kind == "discrete" else ContinuousHead(space, actor.squash)
    distribution = None
    if actor.distribution is not None:
        size = sum(space.num_choices) if space.num_choices is not None else space.size
        distribution = Distribution.model_validate({"kind": actor.distribution, "noise_size": size})
    return TrainedPolicy(
        suggested_name=path.stem,
        observation=fields,
        action=space,
        distribution=distribution,
        architecture=Architecture(name=type(saved.policy).__name__, num_parameters=num_parameters),
        training=Training(
            framework="stable-baselines3",
            framework_version=saved.version,
            algorithm=saved.algorithm,
            seed=saved.seed,
            num_environment_steps=saved.num_timesteps,
            source_sha256=sha256(path),
        ),
        control_period_s=None,
        build_graph=partial(trace, network, head, fields, distribution),
        reference=float64_reference(network, head, fields, actor.parameter_names),
        own_action=_own_action(saved, normalizer),
        scale=_scale(normalizer),
    )


class _Network(nn.Module):
    """From the fields to (mean, log_std), (action,) or (logits,)."""

    def __init__(self, saved: SavedModel, fields: tuple[ObservationField, ...], normalizer: Any) -> None:
        super().__init__()
        policy = saved.policy
        self.algorithm = saved.algorithm
        self.names = [field.name for field in fields]
        self.is_dict = _subspaces(saved.observation_space) is not None
        subspaces = _subspaces(saved.observation_space) or {SINGLE_FIELD: saved.observation_space}
        self.spaces = [subspaces[name] for name in self.names]
        self.shapes = [field.shape for field in fields]
        self.normalizers = nn.ModuleDict(
            {f"of_{name}": _normalizer(normalizer, statistics) for name, statistics in _statistics(normalizer).items()}
        )
        self.pairs_of_logits = type(saved.action_space).__name__ == "MultiBinary"
        if saved.algorithm in ("PPO", "A2C"):
            self.extractor, self.latent = policy.pi_features_extractor, policy.mlp_extractor.policy_net
            self.out = policy.action_net
            self.log_std = policy.log_std if hasattr(policy, "log_std") and not policy.use_sde else None
        elif saved.algorithm == "DQN":
            self.extractor, self.latent = policy.q_net.features_extractor, nn.Identity()
            self.out = policy.q_net.q_net
        else:
            actor = policy.actor
            self.extractor = actor.features_extractor
            self.latent = actor.latent_pi if saved.algorithm == "SAC" else nn.Identity()
            self.out = actor.mu
            self.log_std = actor.log_std if saved.algorithm == "SAC" and not actor.use_sde else None

    def forward(self, *fields: Tensor) -> tuple[Tensor, ...]:
        prepared = {name: self._prepare(index, fields[index]) for index, name in enumerate(self.names)}
        latent = self.latent(self.extractor(prepared if self.is_dict else prepared[SINGLE_FIELD]))
        out: Tensor = self.out(latent)
        if self.pairs_of_logits:  # a yes or no is a choice between a logit of zero and its own
            return (torch.stack([torch.zeros_like(out), out], dim=2).flatten(1),)
        log_std: Any = getattr(self, "log_std", None)
        if log_std is None:
            return (out,)
        if isinstance(log_std, nn.Module):
            return out, log_std(latent).clamp(*_SAC_LOG_STD)
        return out, log_std.expand_as(out)

    def _prepare(self, index: int, x: Tensor) -> Tensor:
        """Normalises, and encodes whole numbers as the library does: one of n."""
        space, name = self.spaces[index], f"of_{self.names[index]}"
        if name in self.normalizers:
            return self.normalizers[name](x.flatten(1)).reshape(-1, *self.shapes[index])
        dtype = next(self.out.parameters()).dtype
        kind = type(space).__name__
        if kind == "Discrete":
            return F.one_hot(x, int(space.n)).to(dtype)
        if kind == "MultiDiscrete":
            columns = x.flatten(1).unbind(1)
            return torch.cat(
                [F.one_hot(one, int(num)).to(dtype) for one, num in zip(columns, space.nvec.flatten(), strict=True)], 1
            )
        return x.to(dtype)


def _describe_actor(saved: SavedModel, space: ActionSpace) -> _Actor:
    policy = saved.policy
    if space.kind == "discrete":
        return _Actor(None, "categorical" if saved.algorithm in ("PPO", "A2C") else None, ("logits",))
    if saved.algorithm in ("PPO", "A2C"):
        squash = "tanh" if policy.squash_output else None
        known = not policy.use_sde
        return _Actor(squash, "gaussian" if known else None, ("mean", "log_std") if known else ())
    if saved.algorithm == "SAC":
        known = not policy.actor.use_sde
        return _Actor("tanh", "squashed_gaussian" if known else None, ("mean", "log_std") if known else ())
    return _Actor("done", None, ())


def _fields(saved: SavedModel) -> tuple[ObservationField, ...]:
    subspaces = _subspaces(saved.observation_space) or {SINGLE_FIELD: saved.observation_space}
    return tuple(_field(name, space, saved.path) for name, space in subspaces.items())


def _field(name: str, space: Any, path: Path) -> ObservationField:
    kind = type(space).__name__
    if name in RESERVED_NAMES:
        raise ExportError(f"{path}: observation field {name!r} has a name the graph uses itself; rename it")
    if kind == "Box":
        size = math.prod(space.shape)
        low, high = inner_bounds(space.low, space.high, size=size, origin=f"{path}: observation field {name}")
        return ObservationField(name=name, shape=tuple(space.shape), low=low, high=high)
    if kind in ("Discrete", "MultiDiscrete", "MultiBinary"):
        shape = () if kind == "Discrete" else tuple(int(one) for one in space.shape)
        choices = {"Discrete": lambda: [space.n], "MultiDiscrete": lambda: space.nvec.flatten()}
        highs = [float(one) - 1 for one in choices.get(kind, lambda: [2] * int(np.prod(shape)))()]
        return ObservationField(name=name, shape=shape, dtype="int64", low=tuple(0.0 for _ in highs), high=tuple(highs))
    raise ExportError(f"{path}: observation field {name} is a {kind} space, which the exporter does not know")


def _action_space(saved: SavedModel) -> ActionSpace:
    space, kind = saved.action_space, type(saved.action_space).__name__
    if kind == "Box":
        shape = tuple(int(one) for one in space.shape)
        low, high = inner_bounds(space.low, space.high, size=int(np.prod(shape)), origin=f"{saved.path}: action")
        return ActionSpace(kind="continuous", shape=shape, dtype="float32", low=low, high=high)
    if kind == "Discrete":
        shape, choices = (), (int(space.n),)
    elif kind == "MultiDiscrete":
        shape, choices = (len(space.nvec),), tuple(int(one) for one in space.nvec)
    elif kind == "MultiBinary":
        shape, choices = (int(space.n),), (2,) * int(space.n)
    else:
        raise ExportError(f"{saved.path}: the action is a {kind} space, which the exporter does not know")
    start: NDArray[np.int64] = np.asarray(getattr(space, "start", 0))
    if start.any():
        raise ExportError(f"{saved.path}: the action counts from {start}; only counting from 0 is supported")
    highs = tuple(float(one - 1) for one in choices)
    return ActionSpace(
        kind="discrete", shape=shape, dtype="int64", num_choices=choices, low=(0.0,) * len(choices), high=highs
    )


def _own_action(saved: SavedModel, normalizer: Any) -> Callable[[Arrays], NDArray[np.generic]]:
    def run(inputs: Arrays) -> NDArray[np.generic]:
        observation: Any = dict(inputs) if _subspaces(saved.observation_space) is not None else inputs[SINGLE_FIELD]
        if normalizer is not None:
            observation = normalizer.normalize_obs(observation)
        return np.asarray(saved.policy.predict(observation, deterministic=True)[0])

    return run


def _subspaces(space: Any) -> Mapping[str, Any] | None:
    return space.spaces if type(space).__name__ == "Dict" else None


def _statistics(normalizer: Any) -> dict[str, Any]:
    """VecNormalize's running statistics by field."""
    if normalizer is None or not normalizer.norm_obs:
        return {}
    statistics: Any = normalizer.obs_rms
    if _subspaces(normalizer.observation_space) is not None:
        return {name: statistics[name] for name in normalizer.norm_obs_keys}
    return {SINGLE_FIELD: statistics}


def _normalizer(normalizer: Any, statistics: Any) -> Normalizer:
    std = np.sqrt(np.asarray(statistics.var, np.float64) + normalizer.epsilon)
    if not (np.isfinite(statistics.mean).all() and np.isfinite(std).all()):
        raise UnreadableSourceError("VecNormalize's statistics hold NaN or infinity; take an earlier checkpoint")
    return Normalizer(statistics.mean, std, clip=float(normalizer.clip_obs))


def _scale(normalizer: Any) -> dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
    return {
        name: (
            np.asarray(one.mean, np.float64).reshape(-1),
            np.sqrt(np.asarray(one.var, np.float64) + normalizer.epsilon).reshape(-1),
        )
        for name, one in _statistics(normalizer).items()
    }
