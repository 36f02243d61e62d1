"""An rsl_rl actor as a policy: its MLP with the empirical normaliser, built from the run's own configuration.

The ``model_*.pt`` holds weights alone. Sizes follow from them, but the activation and the order of the observation
groups do not: they are read from the run's configuration, ``params/agent.yaml`` as Isaac Lab writes it.

Legend: B batch, A action values.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from policy_server.export.actor_module import ContinuousHead, Normalizer, check_weights, float64_reference
from policy_server.export.errors import ExportError, UnreadableSourceError
from policy_server.export.policy import Arrays, TrainedPolicy, inner_bounds
from policy_server.export.torch_module import parse_fields, parse_numbers, trace
from policy_server.manifest import ActionSpace, Architecture, Distribution, ObservationField, Training, sha256

_USUAL_CONFIGS = ("params/agent.yaml", "agent.yaml", "agent.json")
_DEFAULT_GROUP = "policy"
_HAS_CONFIG = "the run's configuration (params/agent.yaml) with its sections 'actor' and 'obs_groups'"


def read_rsl_rl(
    path: Path, *, config: Path | None, observation: tuple[str, ...], low: str | None, high: str | None
) -> TrainedPolicy:
    """Reads ``model_*.pt`` of rsl_rl 4 and 5.

    Args:
        path: The file.
        config: The run's configuration, YAML or JSON; looked for beside the file if None.
        observation: ``name=size`` of each observation group in order; needed only where the actor reads several.
        low: Lower bounds of the action. rsl_rl itself has none: the environment clips or scales.
        high: Upper bounds.

    Raises:
        UnreadableSourceError: The file or the configuration is damaged or something else.
        ExportError: The actor is recurrent or convolutional, or something is missing to build it.
    """
    weights = _read_weights(path)
    settings, groups = _read_config(path, config)
    _refuse_other_models(settings, weights, path)
    fields = _fields(weights, groups, parse_fields(observation), path)
    actor, num_actions = _build_actor(settings, fields, weights, path)
    num_parameters = check_weights(actor, str(path))
    lows, highs = inner_bounds(
        parse_numbers(low, "--action-low"), parse_numbers(high, "--action-high"), size=num_actions, origin="action"
    )
    space = ActionSpace(kind="continuous", shape=(num_actions,), dtype="float32", low=lows, high=highs)
    network, head = _Network(actor), ContinuousHead(space, squash=None)
    gaussian = network.std_of is not None
    distribution = Distribution(kind="gaussian", noise_size=num_actions) if gaussian else None
    parameter_names = ("mean", "log_std") if gaussian else ()
    return TrainedPolicy(
        suggested_name=path.parent.name if path.stem.startswith("model_") else path.stem,
        observation=fields,
        action=space,
        distribution=distribution,
        architecture=Architecture(name="MLPModel", num_parameters=num_parameters),
        training=Training(
            framework="rsl_rl",
            framework_version=version("rsl-rl-lib"),
            algorithm="PPO",
            source_sha256=sha256(path),
        ),
        control_period_s=None,
        build_graph=partial(trace, network, head, fields, distribution),
        reference=float64_reference(network, head, fields, parameter_names),
        own_action=_own_action(actor, fields, head),
        scale=_scale(actor, fields),
    )


class _Network(nn.Module):
    """From the observation groups to (mean, log_std), or (action,) where the distribution is no Gaussian."""

    def __init__(self, actor: Any) -> None:
        super().__init__()
        normalizer = actor.obs_normalizer
        self.normalizer: nn.Module = (
            Normalizer(normalizer._mean.double().numpy(), (normalizer._std + normalizer.eps).double().numpy())
            if actor.obs_normalization
            else nn.Identity()
        )
        self.mlp = actor.mlp
        distribution: Any = actor.distribution
        self.std_of: str | None = {
            "GaussianDistribution": "weights",
            "HeteroscedasticGaussianDistribution": "network",
        }.get(type(distribution).__name__)
        self.deterministic = nn.Identity() if distribution is None else distribution.as_deterministic_output_module()
        if distribution is not None and self.std_of is not None:
            self.in_log = distribution.std_type == "log"
            self.log_std_range = tuple(distribution.log_std_range)
        if distribution is not None and self.std_of == "weights":
            self.std = distribution.log_std_param if self.in_log else distribution.std_param

    def forward(self, *groups: Tensor) -> tuple[Tensor, ...]:
        joined = torch.cat([group.flatten(1) for group in groups], dim=1)
        out: Tensor = self.mlp(self.normalizer(joined))
        action: Tensor = self.deterministic(out)
        if self.std_of is None:
            return (action,)
        spread = self.std.expand_as(action) if self.std_of == "weights" else out[..., 1, :]
        low, high = self.log_std_range
        # Clamped before the logarithm, as the library does: a scalar std may be below zero.
        log_std = spread.clamp(low, high) if self.in_log else spread.clamp(np.exp(low), np.exp(high)).log()
        return action, log_std


def _read_weights(path: Path) -> dict[str, Tensor]:
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch has several
        raise UnreadableSourceError(f"{path}: cannot be read without running code ({error})") from error
    if isinstance(content, dict) and "model_state_dict" in content:
        raise UnreadableSourceError(
            f"{path}: was written by an rsl_rl before 4.0, whose actor and critic were one; load and save it with a "
            "newer one, or export the actor as package.module:factory"
        )
    if not isinstance(content, dict) or "actor_state_dict" not in content:
        raise UnreadableSourceError(f"{path}: holds no 'actor_state_dict'; it is no model of rsl_rl")
    return cast("dict[str, Any]", content)["actor_state_dict"]


def _read_config(path: Path, config: Path | None) -> tuple[dict[str, Any], list[str]]:
    """The actor's section without what is not its constructor's, and its observation groups."""
    folders = (path.parent, path.parent.parent)
    beside = [found for name in _USUAL_CONFIGS for folder in folders if (found := folder / name).exists()]
    chosen = config or next(iter(beside), None)
    if chosen is None:
        raise ExportError(
            f"{path}: its activation and observation groups are not in it; give --config FILE, {_HAS_CONFIG}"
        )
    try:
        text = chosen.read_text()
        content: Any = json.loads(text) if chosen.suffix == ".json" else _parse_yaml(text)
    except OSError as error:
        raise UnreadableSourceError(f"--config {chosen}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UnreadableSourceError(f"--config {chosen}: is neither YAML nor JSON ({error})") from error
    settings = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
    actor: Any = settings.get("actor")
    if not isinstance(actor, dict):
        raise UnreadableSourceError(f"--config {chosen}: has no section 'actor'; it must be {_HAS_CONFIG}")
    groups: dict[str, list[Any]] = settings.get("obs_groups") or {}
    return cast("dict[str, Any]", actor), [str(group) for group in groups.get("actor") or [_DEFAULT_GROUP]]


def _parse_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.load(text, Loader=_plain_loader())  # noqa: S506  # a safe loader that also reads tuples
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _plain_loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML without objects; the tuples and slices that configurations are dumped with become lists."""

    def as_list(loader: Any, node: Any) -> Any:
        return loader.construct_sequence(node, deep=True)

    Loader.add_constructor("tag:yaml.org,2002:python/tuple", as_list)
    Loader.add_constructor("tag:yaml.org,2002:python/object/apply:builtins.slice", as_list)
    return Loader


def _refuse_other_models(settings: Mapping[str, Any], weights: Mapping[str, Tensor], path: Path) -> None:
    name = str(settings.get("class_name", "MLPModel")).rpartition(":")[2].rpartition(".")[2]
    if name == "RNNModel" or any(key.startswith("rnn.") for key in weights):
        raise ExportError(
            f"{path}: the actor is recurrent ({name}), and its state from step to step would be lost; only MLPModel "
            "can be exported"
        )
    if name == "CNNModel" or any(key.startswith("cnns.") for key in weights):
        raise ExportError(f"{path}: the actor is convolutional ({name}); only MLPModel can be exported")
    if name != "MLPModel":
        raise ExportError(f"{path}: the actor is a {name}; only MLPModel can be exported, or package.module:factory")


def _fields(
    weights: Mapping[str, Tensor], groups: list[str], given: tuple[ObservationField, ...], path: Path
) -> tuple[ObservationField, ...]:
    first = weights.get("mlp.0.weight")
    if first is None:
        raise UnreadableSourceError(f"{path}: mlp.0.weight is missing; it is no MLPModel of rsl_rl")
    input_size = int(first.shape[1])
    if not given and len(groups) == 1:
        return parse_fields((f"{groups[0]}={input_size}",))
    sizes = {field.name: field for field in given}
    if sorted(sizes) != sorted(groups):
        wanted = " ".join(f"--observation {group}=SIZE" for group in groups)
        raise ExportError(f"{path}: the actor reads the groups {groups}; give their sizes: {wanted}")
    if (total := sum(field.size for field in given)) != input_size:
        raise ExportError(f"{path}: the actor reads {input_size} values, the --observation fields have {total}")
    return tuple(sizes[group] for group in groups)


def _build_actor(
    settings: Mapping[str, Any], fields: tuple[ObservationField, ...], weights: Mapping[str, Tensor], path: Path
) -> tuple[Any, int]:
    """Rsl_rl's own model with the weights in it, and the number of action values."""
    from rsl_rl.models import MLPModel  # pyright: ignore[reportMissingTypeStubs]
    from tensordict import TensorDict

    arguments = {key: value for key, value in copy.deepcopy(dict(settings)).items() if key != "class_name"}
    last = max((name for name in weights if name.startswith("mlp.")), key=lambda name: int(name.split(".")[1]))
    outputs = int(weights[last].shape[0])
    heads = 2 if _makes_two(arguments.get("distribution_cfg")) else 1
    observation = TensorDict({field.name: torch.zeros(1, field.size) for field in fields}, batch_size=[1])
    groups = {"actor": [field.name for field in fields]}
    try:
        actor = MLPModel(observation, groups, "actor", outputs // heads, **arguments)
        actor.load_state_dict(dict(weights))
    except Exception as error:  # whatever does not fit
        reason = " ".join(str(error).split())
        raise UnreadableSourceError(f"{path}: its weights do not fit the configuration's 'actor' ({reason})") from error
    return actor.eval(), outputs // heads


def _makes_two(distribution: Any) -> bool:
    settings: dict[str, Any] = distribution or {}
    name = str(settings.get("class_name", ""))
    return "Heteroscedastic" in name or "Beta" in name


def _own_action(
    actor: Any, fields: tuple[ObservationField, ...], head: nn.Module
) -> Callable[[Arrays], NDArray[np.generic]]:
    from tensordict import TensorDict

    clip = copy.deepcopy(head)

    def run(inputs: Arrays) -> NDArray[np.generic]:
        groups = {field.name: torch.as_tensor(np.asarray(inputs[field.name], np.float32)) for field in fields}
        num = len(next(iter(groups.values())))
        with torch.no_grad():
            action = actor(TensorDict({name: one.flatten(1) for name, one in groups.items()}, batch_size=[num]))
            return clip((action,), None).numpy()

    return run


def _scale(
    actor: Any, fields: tuple[ObservationField, ...]
) -> dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
    if not actor.obs_normalization:
        return {}
    mean, std = (
        np.asarray(one.double().numpy(), np.float64).reshape(-1)
        for one in (actor.obs_normalizer.mean, actor.obs_normalizer.std)
    )
    ends = np.cumsum([field.size for field in fields])[:-1]
    parts = zip(fields, np.split(mean, ends), np.split(std, ends), strict=True)
    return {field.name: (of_mean, of_std) for field, of_mean, of_std in parts}
