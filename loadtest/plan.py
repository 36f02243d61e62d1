"""Everything that a load test is, in one value that travels to the generator's processes as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from loadtest.errors import UsageError
from loadtest.record_file import Format
from loadtest.settings import LlmSettings, LoadSettings, PolicySettings, above_0, at_least
from loadtest.slo import Slo


@dataclass(frozen=True, kw_only=True)
class SweepSettings:
    """The search for the highest load that holds.

    Args:
        limit: The highest load to try, users or requests a second.
        precision: Stops when the gap between what held and what did not is that share.
    """

    limit: float = 100_000.0
    precision: float = 0.05

    def __post_init__(self) -> None:
        above_0("sweep_limit", self.limit)
        above_0("sweep_precision", self.precision)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A load test.

    Args:
        llm: The language model to load; None for none.
        llm_load: How much.
        policy: The policy to load; None for none.
        policy_load: How much.
        slos: What has to hold.
        sweep: Search the highest load instead of running one; for one server only.
        output: Folder for everything that is left behind.
        records: Format of the records.
        processes: Generator processes.
        expect_workers: Processes on other machines that join through ``loadtest worker``.
        bind: Where those reach this one, as HOST:PORT; None when there are none.
        web_port: Port of locust's own page; None for no page.
        measure_ceiling: Measure how much this generator can send at all.
        command: The command line, for the report.
    """

    llm: LlmSettings | None = None
    llm_load: LoadSettings | None = None
    policy: PolicySettings | None = None
    policy_load: LoadSettings | None = None
    slos: tuple[Slo, ...] = ()
    sweep: SweepSettings | None = None
    output: Path = Path("loadtest-results")
    records: Format = "auto"
    processes: int = 1
    expect_workers: int = 0
    bind: str | None = None
    web_port: int | None = None
    measure_ceiling: bool = True
    command: str = ""

    def __post_init__(self) -> None:
        if self.llm is None and self.policy is None:
            raise UsageError("url: missing; give the server's address, such as http://127.0.0.1:8000")
        if (self.llm is None, self.policy is None) != (self.llm_load is None, self.policy_load is None):
            raise UsageError("load: each server has one, and there is none without a server")
        for slo in self.slos:
            if self.is_mixed != (slo.part is not None):
                hint = f"write llm.{slo.name} or policy.{slo.name}" if self.is_mixed else f"write {slo.name}"
                raise UsageError(f"slo={slo.full_name!r}: a mixed run has two servers, others have one; {hint}")
        if self.sweep is not None:
            self._check_sweep()
        if self.llm is not None and self.llm.turns > 1 and self.llm_load is not None and self.llm_load.mode == "open":
            raise UsageError(f"turns={self.llm.turns}: conversations need users; leave --rate out, or --turns")
        paced = self.policy is not None and self.policy.control_hz is not None
        if paced and self.policy_load is not None and self.policy_load.mode == "open":
            raise UsageError("control_hz: is for users, who each act at that rate; leave --rate out, or --control-hz")
        at_least("processes", self.processes, 1)
        at_least("expect_workers", self.expect_workers, 0)
        for load in self.loads:
            if load.mode == "closed" and self.num_generators > load.users:
                raise UsageError(
                    f"processes={self.num_generators}: more than users={load.users}; each process needs a user"
                )

    def _check_sweep(self) -> None:
        if self.is_mixed:
            raise UsageError("sweep: searches the load of one server; a mixed run has two")
        if not self.slos:
            raise UsageError("sweep: needs an SLO to hold, such as --slo p99_latency_ms=50")

    @property
    def num_generators(self) -> int:
        """Processes that send requests, on this machine and others."""
        return self.processes + self.expect_workers

    @property
    def is_mixed(self) -> bool:
        """Whether both servers are loaded at once."""
        return self.llm is not None and self.policy is not None

    @property
    def kind(self) -> str:
        """``llm``, ``policy`` or ``mixed``."""
        return "mixed" if self.is_mixed else "llm" if self.llm is not None else "policy"

    @property
    def loads(self) -> list[LoadSettings]:
        """The load of each server."""
        return [load for load in (self.llm_load, self.policy_load) if load is not None]

    def shown(self) -> dict[str, Any]:
        """As JSON for the report; keys are left out."""
        content: dict[str, Any] = _ADAPTER.dump_python(self, mode="json")
        for target in (content["llm"], content["policy"]):
            if target is not None:
                target["api_key"] = None if target["api_key"] is None else "***"
                target["headers"] = [[name, "***"] for name, _ in target["headers"]]
        return content

    def to_json(self) -> str:
        """For another process."""
        return _ADAPTER.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """What another process has sent."""
        return _ADAPTER.validate_json(text)


_ADAPTER = TypeAdapter(Plan)
