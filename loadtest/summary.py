"""``summary.json``: what a load test found. Its schema is ``summary.schema.json`` in this package.

python -m loadtest.summary > loadtest/summary.schema.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from loadtest.errors import UsageError
from loadtest.figures import Figures, Stats
from loadtest.slo import SloResult

SUMMARY_FILE = "summary.json"
SCHEMA_VERSION = 1
NEAR_CEILING = 0.8
"""From this share of its own ceiling on, a generator is said to be what limits a run."""


class GeneratorFigures(BaseModel):
    """How near the generator came to its own limits."""

    num_processes: int = Field(description="Processes that sent requests.")
    ceiling_per_s: float | None = Field(
        description="Requests a second that this generator reaches with the same requests against a server that does "
        "nothing, all processes together; null when it was not measured."
    )
    share: float | None = Field(description="Measured requests a second, of the ceiling.")
    num_not_sent: int = Field(description="Open loop: requests that were not sent, as too many were in flight.")
    send_lag_ms: Stats | None = Field(description="Open loop: how much later than intended requests were sent.")

    @property
    def is_limiting(self) -> bool:
        """Whether the figures may be the generator's and not the server's."""
        return self.share is not None and self.share >= NEAR_CEILING


class Stage(BaseModel):
    """One load of a sweep."""

    load: float = Field(description="Users, or requests a second in open loop.")
    holds: bool = Field(description="Whether every SLO held.")
    figures: Figures


class Summary(BaseModel):
    """What a load test found."""

    schema_version: Literal[1] = SCHEMA_VERSION
    kind: Literal["llm", "policy", "mixed"]
    target: str = Field(description="Address of the server.")
    started_at: str = Field(description="When it began; ISO 8601, UTC.")
    command: str = Field(description="The command line.")
    settings: dict[str, Any] = Field(description="Everything that was asked for; keys are left out.")
    figures: Figures = Field(description="Of the whole run; of the best load, for a sweep.")
    parts: dict[str, Figures] = Field(
        default_factory=dict[str, Figures], description="Of a mixed run: each server's figures, by llm and policy."
    )
    stages: list[Stage] = Field(default_factory=list[Stage], description="The loads of a sweep, in order.")
    best_load: float | None = Field(default=None, description="The highest load of the sweep that held every SLO.")
    slos: list[SloResult] = Field(default_factory=list[SloResult])
    generator: GeneratorFigures
    server: dict[str, Any] = Field(
        default_factory=dict[str, Any], description="What the server's own metrics showed, by name."
    )
    stopped_early: str | None = Field(default=None, description="Why it ended before its time; null if it did not.")
    notes: list[str] = Field(default_factory=list[str], description="What a reader of the figures should know.")

    @property
    def holds(self) -> bool:
        """Whether every SLO holds."""
        return all(slo.holds for slo in self.slos)


def read_summary(folder: Path) -> Summary:
    """The summary in an output folder.

    Raises:
        UsageError: There is none, or it is of another release.
    """
    path = folder / SUMMARY_FILE
    try:
        content: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); name an --output folder of a load test") from None
    except ValueError as error:
        raise UsageError(f"{path}: is not JSON ({error})") from None
    try:
        return Summary.model_validate(content)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"]) or "it"
        raise UsageError(f"{path}: not a summary that this release reads ({where}: {problem['msg']})") from None


def schema() -> str:
    """The schema's text."""
    return json.dumps(Summary.model_json_schema(), indent=2) + "\n"


if __name__ == "__main__":
    import sys

    sys.stdout.write(schema())
