"""Checkpoint formats, conversion between them, and the doctor.

Exports are listed in ``__init__.pyi`` and load when first used: reading a config or
safetensors headers needs no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
