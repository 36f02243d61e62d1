"""Gated model families as transformers classes.

Exports are listed in ``__init__.pyi`` and load when first used, so that reading a config does not import the models.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
