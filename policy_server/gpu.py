"""Names the NVIDIA GPU through the driver's own library, with nothing else installed."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import partial
from typing import Any

_LIBRARY = "libcuda.so.1"
_NAME_BYTES = 256
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


@dataclass(frozen=True)
class Gpu:
    """The first visible GPU.

    Attributes:
        name: Its name, as ``nvidia-smi`` shows it.
        compute_capability: Such as (9, 0).
    """

    name: str
    compute_capability: tuple[int, int]


class NoGpuError(Exception):
    """There is no NVIDIA GPU to be used here; the message says what is missing."""


def find_gpu(library: str = _LIBRARY) -> Gpu:
    """The first GPU that ``CUDA_VISIBLE_DEVICES`` leaves visible.

    Args:
        library: The driver's library.

    Raises:
        NoGpuError: There is no driver, or no GPU visible to it.
    """
    try:
        driver: Any = ctypes.CDLL(library)
    except OSError as error:
        raise NoGpuError(f"no NVIDIA driver was found ({error}); install the driver, or run where a GPU is") from error
    call = partial(_call, driver)
    call("cuInit", 0)
    count, device = ctypes.c_int(), ctypes.c_int()
    call("cuDeviceGetCount", ctypes.byref(count))
    if count.value == 0:
        raise NoGpuError("the NVIDIA driver shows no GPU; look at CUDA_VISIBLE_DEVICES and nvidia-smi")
    call("cuDeviceGet", ctypes.byref(device), 0)
    name = ctypes.create_string_buffer(_NAME_BYTES)
    call("cuDeviceGetName", name, _NAME_BYTES, device)
    version = [ctypes.c_int(), ctypes.c_int()]
    for value, attribute in zip(version, (_CAPABILITY_MAJOR, _CAPABILITY_MINOR), strict=True):
        call("cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
    return Gpu(name.value.decode(errors="replace"), (version[0].value, version[1].value))


def _call(driver: Any, function: str, *arguments: Any) -> None:
    if (status := getattr(driver, function)(*arguments)) != 0:
        raise NoGpuError(f"the NVIDIA driver refuses {function} (CUresult {status}); look at nvidia-smi")
