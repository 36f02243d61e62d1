"""Finds out which tensors of a checkpoint something was computed or copied from while a model was loaded."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class UseRecorder(TorchDispatchMode):
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
