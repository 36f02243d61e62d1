"""What a run writes down: one JSON line and TensorBoard scalars for every log event."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"


class MetricsLog:
    """Appends to ``metrics.jsonl`` and to TensorBoard's files; both count in environment steps.

    Args:
        folder: The run's folder.
        num_environment_steps: Where the run begins or goes on. Lines past it are dropped: none appears twice.
    """

    def __init__(self, folder: Path, *, num_environment_steps: int) -> None:
        self.path = folder / METRICS
        kept = [line for line in read_metrics(self.path) if line["environment_steps"] <= num_environment_steps]
        # Written beside and exchanged, so that a kill in between loses nothing.
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
        partial.replace(self.path)
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # an installed TensorFlow greets at import
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / TENSORBOARD), purge_step=num_environment_steps + 1)

    def write(self, position: Mapping[str, Any], values: Mapping[str, float], *, group: str) -> None:
        """Writes values of one moment.

        Args:
            position: Where the run is; with ``environment_steps``.
            values: By name.
            group: Under which TensorBoard shows them, and, unless it is ``train``, the key that holds them in the line.
        """
        line = {**position, **(values if group == "train" else {group: dict(values)})}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        for name, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(f"{group}/{name}", value, position["environment_steps"])

    def flush(self) -> None:
        """Writes through what TensorBoard holds back."""
        self._writer.flush()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads ``metrics.jsonl``; a last line that a killed process left unfinished is skipped."""
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
