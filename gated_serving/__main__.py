"""``python -m gated_serving``, for launchers such as torchrun that want a module."""

from gated_serving.cli import main

main()
