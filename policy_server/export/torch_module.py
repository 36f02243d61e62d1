"""Any ``torch.nn.Module`` as a policy, through torch's own exporter.

The batch is exported as a free dimension with an example of more than one observation (torch bakes in a batch of one),
and the weights lie in the one file.

Legend: B batch.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import logging
import sys
import warnings
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from policy_server.export.actor_module import ActorModule, ContinuousHead, check_weights, float64_reference
from policy_server.export.errors import ExportError, UnreadableSourceError
from policy_server.export.policy import OPSET, TrainedPolicy, inner_bounds
from policy_server.manifest import (
    RESERVED_NAMES,
    ActionSpace,
    Architecture,
    Distribution,
    ObservationField,
    Outputs,
    Training,
)

_EXAMPLE_BATCH = 3


def trace(
    network: nn.Module,
    head: nn.Module,
    fields: tuple[ObservationField, ...],
    distribution: Distribution | None,
    outputs: Outputs,
) -> onnx.ModelProto:
    """Exports network and head as one float32 graph.

    Args:
        network: See ``ActorModule``.
        head: See ``ActorModule``.
        fields: The graph's inputs.
        distribution: Names the further outputs.
        outputs: Whether noise is an input and the distribution's parameters are outputs.

    Raises:
        ExportError: torch cannot export it; its reason is in the message.
    """
    sampled = outputs == Outputs.DISTRIBUTION
    module = ActorModule(copy.deepcopy(network), copy.deepcopy(head), outputs).float().eval()
    examples = [_example(field) for field in fields]
    names, results = [field.name for field in fields], ["action"]
    if sampled:
        assert distribution is not None
        examples.append(torch.randn(_EXAMPLE_BATCH, distribution.noise_size))
        names.append("noise")
        results += distribution.parameters
    batch = torch.export.Dim("batch")
    try:
        with _quiet():
            program = cast("Any", torch.onnx).export(
                module,
                tuple(examples),
                input_names=names,
                output_names=results,
                dynamic_shapes=(tuple({0: batch} for _ in names),),  # one tuple for *inputs
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
            )
    except Exception as error:  # whatever tracing meets
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ExportError(
            f"torch.onnx cannot export this module with a free batch: {reason}; the batch must be the first dimension "
            "throughout, and no branch may depend on values"
        ) from error
    model: onnx.ModelProto = program.model_proto
    del model.metadata_props[:]  # they name paths of this machine
    for node in model.graph.node:
        del node.metadata_props[:]
        node.ClearField("doc_string")
    return model


def read_torch_module(
    import_path: str, *, observation: tuple[str, ...], low: str | None, high: str | None
) -> TrainedPolicy:
    """Imports ``package.module:factory`` and takes the module it gives.

    Args:
        import_path: The factory, called without arguments, or an ``nn.Module`` itself. Its forward takes one tensor
            [B, *shape] a field, in order, and gives the action [B, *shape].
        observation: ``name=shape`` of each field, such as ``observation=10`` or ``image=3x64x64``.
        low: Lower bounds of the action, one number or one a value, separated by commas; unbounded if None.
        high: Upper bounds.

    Raises:
        UnreadableSourceError: It cannot be imported, or gives no module.
        ExportError: An option is missing or wrong, or the module keeps a state from step to step.
    """
    fields = parse_fields(observation)
    if not fields:
        raise ExportError(f"{import_path}: say what the module takes, such as --observation observation=10")
    module = _import_module(import_path).eval()
    for part in module.modules():
        if isinstance(part, nn.RNNBase | nn.RNNCellBase):
            raise ExportError(
                f"{import_path}: it is recurrent ({type(part).__name__}), and its state from step to step "
                "would be lost; only policies without a memory can be exported"
            )
    num_parameters = check_weights(module, import_path)
    network = _Single(module)
    try:
        with torch.no_grad():
            action = network(*(_example(field) for field in fields))[0]
    except UnreadableSourceError:
        raise
    except Exception as error:  # the user's own code
        shapes = ", ".join(f"{field.name} [B, {', '.join(map(str, field.shape))}]" for field in fields)
        raise ExportError(f"{import_path}: forward fails on {shapes}: {error}") from error
    if action.ndim < 2 or action.shape[0] != _EXAMPLE_BATCH or not action.is_floating_point():
        raise ExportError(f"{import_path}: gives {action.dtype} {list(action.shape)}, not a float [B, *shape]")
    shape = tuple(action.shape[1:])
    lower, upper = (parse_numbers(text, option) for text, option in ((low, "--action-low"), (high, "--action-high")))
    lows, highs = inner_bounds(lower, upper, size=int(np.prod(shape)), origin="action")
    space = ActionSpace(kind="continuous", shape=shape, dtype="float32", low=lows, high=highs)
    head = ContinuousHead(space, squash=None)
    return TrainedPolicy(
        suggested_name=import_path.partition(":")[2],
        observation=fields,
        action=space,
        distribution=None,
        architecture=Architecture(name=type(module).__name__, num_parameters=max(num_parameters, 1)),
        training=Training(framework="torch", framework_version=str(torch.__version__)),
        control_period_s=None,
        build_graph=partial(trace, network, head, fields, None),
        reference=float64_reference(network, head, fields, ()),
    )


def parse_fields(texts: tuple[str, ...]) -> tuple[ObservationField, ...]:
    """Reads ``name=10`` or ``name=3x64x64``.

    Raises:
        ExportError: One is neither.
    """
    fields: list[ObservationField] = []
    for text in texts:
        name, separator, shape = text.rpartition("=")
        sizes = shape.split("x")
        if not separator or not all(size.isascii() and size.isdigit() and int(size) > 0 for size in sizes):
            raise ExportError(f"--observation {text!r}: must be name=size or name=2x3, such as observation=10")
        if not name or name in RESERVED_NAMES or name in {field.name for field in fields}:
            raise ExportError(f"--observation {text!r}: {name!r} is taken; choose another name")
        fields.append(ObservationField(name=name, shape=tuple(int(size) for size in sizes)))
    return tuple(fields)


def parse_numbers(text: str | None, option: str) -> list[float] | None:
    """Reads ``-1`` or ``-1,-2,0.5``.

    Raises:
        ExportError: It is neither.
    """
    if text is None:
        return None
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise ExportError(f"{option} {text!r}: must be a number or several, separated by commas") from None


class _Single(nn.Module):
    """A module with one output as one that gives a tuple."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *fields: Tensor) -> tuple[Tensor]:
        action: object = self.module(*fields)
        if not isinstance(action, Tensor):
            raise UnreadableSourceError(
                f"{type(self.module).__name__} gives a {type(action).__name__}; its forward must give the action alone"
            )
        return (action,)


def _import_module(import_path: str) -> nn.Module:
    module_name, _, attribute = import_path.partition(":")
    folder = str(Path.cwd())
    sys.path.insert(0, folder)  # as for a script there
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
        if not isinstance(found, nn.Module):
            found = found()
    except Exception as error:  # the user's own code
        raise UnreadableSourceError(f"{import_path}: cannot be imported ({type(error).__name__}: {error})") from error
    finally:
        sys.path.remove(folder)
    if not isinstance(found, nn.Module):
        raise UnreadableSourceError(f"{import_path}: gives a {type(found).__name__}, not a torch.nn.Module")
    return found


def _example(field: ObservationField) -> Tensor:
    shape = (_EXAMPLE_BATCH, *field.shape)
    return torch.zeros(shape, dtype=torch.int64) if field.dtype == "int64" else torch.randn(shape)


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """The exporter reports its every step, on three channels; what fails is raised all the same."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
