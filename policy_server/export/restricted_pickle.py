"""Unpickles what Stable-Baselines3 writes beside its weights, and nothing that could run code of somebody else's.

Its files keep the spaces, the network's settings and VecNormalize's statistics as pickles, and a pickle may call
anything. Here only classes of the libraries that these things are made of can be named.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from policy_server.export.errors import ExportError, UnreadableSourceError

_CLASS_PACKAGES = (
    "gymnasium.spaces",
    "stable_baselines3.common.policies",
    "stable_baselines3.common.running_mean_std",
    "stable_baselines3.common.torch_layers",
    "stable_baselines3.common.vec_env.vec_normalize",
    "stable_baselines3.dqn.policies",
    "stable_baselines3.sac.policies",
    "stable_baselines3.td3.policies",
    "torch.nn.modules.activation",
    "torch.optim",
)
_GLOBALS = {
    ("builtins", "set"),
    ("builtins", "slice"),
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy._core.numeric", "_frombuffer"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy.core.numeric", "_frombuffer"),
    ("numpy.random._pickle", "__bit_generator_ctor"),
    ("numpy.random._pickle", "__generator_ctor"),
    ("numpy.random._pcg64", "PCG64"),
    ("numpy.random.bit_generator", "SeedSequence"),
    ("numpy.random.bit_generator", "__pyx_unpickle_SeedSequence"),
}


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) in _GLOBALS:
            return super().find_class(module_name, global_name)
        # A dotted name could walk from an allowed module into any other that it imports.
        if "." not in global_name and _is_known(module_name):
            found = super().find_class(module_name, global_name)
            if isinstance(found, type) and _is_known(found.__module__):
                return found
        raise _ForeignClassError(f"{module_name}.{global_name}")


class _ForeignClassError(pickle.UnpicklingError):
    pass


def _is_known(module_name: str) -> bool:
    return any(module_name == package or module_name.startswith(f"{package}.") for package in _CLASS_PACKAGES)


def load_pickle(data: bytes, origin: str, *, trust: bool = False) -> Any:
    """Unpickles data.

    Args:
        data: The pickle.
        origin: Where it is from, for messages.
        trust: Run whatever it names.

    Raises:
        ExportError: It names a class that is not known.
        UnreadableSourceError: It is damaged.
    """
    try:
        if trust:
            return pickle.loads(data)  # noqa: S301  # asked for by --trust-pickle
        return _RestrictedUnpickler(io.BytesIO(data)).load()
    except _ForeignClassError as error:
        raise ExportError(
            f"{origin}: needs {error}, which is none of Stable-Baselines3's own; a pickle can run anything, so give "
            "--trust-pickle if the file is your own"
        ) from None
    except Exception as error:  # a pickle can fail in any way
        raise UnreadableSourceError(f"{origin}: cannot be unpickled ({type(error).__name__}: {error})") from error
