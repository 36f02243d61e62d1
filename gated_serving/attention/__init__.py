"""The gate of gated attention: its config, its packings, its plain reference and its fast form.

Exports are listed in ``__init__.pyi`` and load when first used: the config needs no torch, the rest does.
"""

import lazy_loader  # pyright: ignore[reportMissingTypeStubs]

# pyright: reportUnknownVariableType=false

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
