"""Refuses a checkpoint whose attention has a gate in tensors of its own that the model does not use.

Many of vLLM's models skip tensors that they do not know. A name alone does not tell: some fuse a gate into another
parameter. So the tensors that look like a gate, belong to a layer that the model has, and have no namesake in it are
watched until loading ends; the ones that nothing was computed or copied from are what the model has no use for.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

_MARK = "_vllm_gated_unused_gates"
_ATTENTION = re.compile(r"(^|.*_)(attn|attention)(_.*|$)")
_GATE = re.compile(r"(.*_)?gate(_.*)?|g_proj|g_const|w_?g")


class UnusedGateError(ValueError):
    """A checkpoint has a gate that the model does not use."""


def guard_loader() -> None:
    """Watches the loading of every model that vLLM makes from now on; safe to call again.

    Raises:
        AttributeError: This vLLM makes its models elsewhere.
    """
    create = BaseModelLoader.create_model
    if getattr(create, _MARK, False):
        return

    @functools.wraps(create)
    def create_model(self: BaseModelLoader, *args: Any, **kwargs: Any) -> nn.Module:
        model = create(self, *args, **kwargs)
        if hasattr(model, "load_weights"):
            watch_loading(model)
        return model

    setattr(create_model, _MARK, True)
    BaseModelLoader.create_model = create_model


def watch_loading(model: nn.Module) -> None:
    """Makes ``model.load_weights`` refuse unused gates, and name the tensor at which any other error came up."""
    load: Any = model.load_weights

    @functools.wraps(load)
    def load_weights(weights: Iterable[tuple[str, Tensor]], *args: Any, **kwargs: Any) -> Any:
        watch = _GateWatch(model)
        try:
            loaded = load(watch.named(weights), *args, **kwargs)
        except Exception as error:
            watch.stop()
            watch.refuse_unused(cause=error)
            if watch.latest:
                error.add_note(f"while loading {watch.latest}")
            raise
        watch.stop()
        watch.refuse_unused()
        return loaded

    setattr(model, "load_weights", load_weights)  # noqa: B010  # nn.Module declares tensors and modules only


class _GateWatch:
    """The suspicious tensors of one load."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.latest = ""
        self.uses: _UseRecorder | None = None

    def named(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Passes the weights on, each tensor with its name on it."""
        for name, tensor in weights:
            self.latest = f"{name}, shape {list(tensor.shape)}"
            tensor.checkpoint_name = name  # pyright: ignore[reportAttributeAccessIssue]
            if self._is_suspicious(name):
                if self.uses is None:
                    self.uses = _UseRecorder()
                    self.uses.__enter__()
                self.uses.watch(name, tensor)
            yield name, tensor

    def stop(self) -> None:
        """Ends the recording."""
        if self.uses is not None:
            self.uses.__exit__(None, None, None)

    def refuse_unused(self, *, cause: Exception | None = None) -> None:
        """Raises if a watched tensor was not used."""
        unused = self.uses.unused() if self.uses is not None else {}
        if not unused:
            return
        name, shape = next(iter(unused.items()))
        more = f" (and {len(unused) - 1} more)" if len(unused) > 1 else ""
        raise UnusedGateError(
            f"{name}, shape {shape}{more}: the checkpoint has a gate that {type(self.model).__name__} has no use for, "
            "expected no such tensor; the model would answer wrong without it. Either config.json names the wrong "
            "architecture or gate, or no class here can serve this model."
        ) from cause

    def _is_suspicious(self, name: str) -> bool:
        """Whether a tensor looks like the gate of an attention layer that the model has, without a namesake there."""
        parts = name.split(".")
        attention = next((index for index, part in enumerate(parts) if _ATTENTION.fullmatch(part)), None)
        if attention is None or not any(_GATE.fullmatch(part) for part in parts[attention + 1 :]):
            return False
        for path in {name, self._renamed(name)}:
            parts = path.split(".")
            attention = next((index for index, part in enumerate(parts) if _ATTENTION.fullmatch(part)), len(parts))
            layer = _descendant(self.model, parts[: attention + 1])
            if layer is not None:
                return not _has_member(layer, parts[attention + 1 :])
        return False

    def _renamed(self, name: str) -> str:
        mapper = getattr(self.model, "hf_to_vllm_mapper", None)
        rename = getattr(mapper, "get_rename_mapper", None)
        return (rename().map_name(name) or name) if rename is not None else name


class _UseRecorder(TorchDispatchMode):
    """Notes which of the watched tensors are read. Views of a tensor are not uses, whatever reads a view is."""

    def __init__(self) -> None:
        super().__init__()
        self._watched: dict[str, Tensor] = {}

    def watch(self, name: str, tensor: Tensor) -> None:
        """Keeps the tensor alive until it is used, so that no other takes its address."""
        self._watched[name] = tensor

    def unused(self) -> dict[str, list[int]]:
        """Shapes of the watched tensors that nothing read."""
        return {name: list(tensor.shape) for name, tensor in self._watched.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._watched and not func.is_view:
            for argument in tree_leaves((args, kwargs)):
                if isinstance(argument, Tensor):
                    self._forget(argument)
        return func(*args, **(kwargs or {}))

    def _forget(self, used: Tensor) -> None:
        address = _address(used)
        for name in [name for name, tensor in self._watched.items() if _contains(tensor, address)]:
            del self._watched[name]


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a tensor without memory of its own, such as one on the meta device
        return 0


def _contains(tensor: Tensor, address: int) -> bool:
    start = _address(tensor)
    return start <= address < start + max(tensor.nbytes, 1)


def _descendant(module: nn.Module, path: list[str]) -> nn.Module | None:
    for part in path:
        children = dict(module.named_children())
        if part not in children:
            return None
        module = children[part]
    return module


def _has_member(module: nn.Module, path: list[str]) -> bool:
    """Whether the first step of ``path`` is a child, parameter or buffer of ``module``."""
    return path[0] in dict(module.named_children()) or hasattr(module, path[0])
