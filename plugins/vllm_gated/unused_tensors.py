"""Refuses a checkpoint with a gate in tensors of its own, or a bias of a projection, that the model does not use.

Many of vLLM's models skip tensors that they do not know. A name alone does not tell: some fuse a tensor into another
parameter. So the tensors that look like a gate or a bias, belong to a layer that the model has, and have no namesake
in it are watched until loading ends; the ones that nothing was computed or copied from are what the model has no use
for. A bias of zeros, or one without a weight beside it, is harmless: tools for quantisation (GPTQ) leave such behind,
and vLLM skips biases on their account.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from vllm_gated.use_recorder import UseRecorder

_MARK = "_vllm_gated_unused_tensors"
_ATTENTION = re.compile(r"(^|.*_)(attn|attention)(_.*|$)")
_FEED_FORWARD = re.compile(r"mlp|ffn|feed_forward")
_GATE = re.compile(r"(.*_)?gate(_.*)?|g_proj|g_const|w_?g")
_BIAS = ".bias"
_WEIGHT = ".weight"


class UnusedTensorError(ValueError):
    """A checkpoint has a gate or a bias that the model does not use."""


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
    """Makes ``model.load_weights`` refuse unused gates and biases, and name the tensor any other error came from."""
    load: Any = model.load_weights

    @functools.wraps(load)
    def load_weights(weights: Iterable[tuple[str, Tensor]], *args: Any, **kwargs: Any) -> Any:
        watch = _LoadWatch(model)
        try:
            loaded = load(watch.named(weights), *args, **kwargs)
        except Exception as error:
            watch.stop()
            watch.refuse_unused_gate(cause=error)
            if watch.latest:
                error.add_note(f"while loading {watch.latest}")
            raise
        watch.stop()
        watch.refuse_unused_gate()
        watch.refuse_unused_bias()
        return loaded

    setattr(model, "load_weights", load_weights)  # noqa: B010  # nn.Module declares tensors and modules only


class _LoadWatch:
    """The suspicious tensors of one load."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.latest = ""
        self.uses: UseRecorder | None = None
        self.biases: set[str] = set()  # those that are watched; the other watched tensors are gates
        self.weighted: set[str] = set()  # modules whose weight the checkpoint has

    def named(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Passes the weights on, each tensor with its name on it."""
        for name, tensor in weights:
            self.latest = f"{name}, shape {list(tensor.shape)}"
            tensor.checkpoint_name = name  # pyright: ignore[reportAttributeAccessIssue]
            if name.endswith(_WEIGHT):
                self.weighted.add(name.removesuffix(_WEIGHT))
            is_gate = self._is_homeless_gate(name)
            if not is_gate and self._is_homeless_bias(name, tensor):
                self.biases.add(name)
            if is_gate or name in self.biases:
                if self.uses is None:
                    self.uses = UseRecorder()
                    self.uses.__enter__()
                self.uses.watch(name, tensor)
            yield name, tensor

    def stop(self) -> None:
        """Ends the recording."""
        if self.uses is not None:
            self.uses.__exit__(None, None, None)

    def refuse_unused_gate(self, *, cause: Exception | None = None) -> None:
        """Raises if a watched gate was not used."""
        self._refuse(
            {name: shape for name, shape in self._unused().items() if name not in self.biases},
            "a gate",
            "Either config.json names the wrong architecture or gate, or no class here can serve this model.",
            cause,
        )

    def refuse_unused_bias(self) -> None:
        """Raises if a watched bias was not used while the checkpoint has the weight beside it."""
        self._refuse(
            {
                name: shape
                for name, shape in self._unused().items()
                if name in self.biases and name.removesuffix(_BIAS) in self.weighted
            },
            "a bias",
            "Either config.json denies its biases (attention_bias, qkv_bias, mlp_bias), or the class here has none.",
        )

    def _unused(self) -> dict[str, list[int]]:
        return self.uses.unused() if self.uses is not None else {}

    def _refuse(self, unused: dict[str, list[int]], what: str, advice: str, cause: Exception | None = None) -> None:
        if not unused:
            return
        name, shape = next(iter(unused.items()))
        more = f" (and {len(unused) - 1} more)" if len(unused) > 1 else ""
        raise UnusedTensorError(
            f"{name}, shape {shape}{more}: the checkpoint has {what} that {type(self.model).__name__} has no use for, "
            f"expected no such tensor; the model would answer wrong without it. {advice}"
        ) from cause

    def _is_homeless_gate(self, name: str) -> bool:
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

    def _is_homeless_bias(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor is the bias, not of zeros, of an attention or feed-forward layer, without a namesake."""
        if not name.endswith(_BIAS) or tensor.ndim != 1:
            return False
        for path in {name, self._renamed(name)}:
            *layer, module, _ = path.split(".")
            if not layer or not (_ATTENTION.fullmatch(layer[-1]) or _FEED_FORWARD.fullmatch(layer[-1])):
                continue
            if (owner := _descendant(self.model, layer)) is not None:
                home = _descendant(owner, [module])
                return getattr(home, "bias", None) is None and bool(tensor.any())
        return False

    def _renamed(self, name: str) -> str:
        mapper = getattr(self.model, "hf_to_vllm_mapper", None)
        rename = getattr(mapper, "get_rename_mapper", None)
        return (rename().map_name(name) or name) if rename is not None else name


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
