"""A load test from its plan to what it leaves behind."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, Protocol, cast

import gevent

from loadtest.ceiling import measure_ceiling
from loadtest.errors import UsageError
from loadtest.figures import Figures, Stats, compute_figures
from loadtest.generator import with_load
from loadtest.leader import Leader, News
from loadtest.plan import Plan
from loadtest.record_file import RecordWriter, write_whole
from loadtest.records import RequestRecord
from loadtest.report import write_report
from loadtest.scrape import SERVER_METRICS_FILE, Scraper
from loadtest.settings import LoadSettings
from loadtest.slo import Part, request_limits
from loadtest.summary import NEAR_CEILING, SUMMARY_FILE, GeneratorFigures, Stage, Summary
from loadtest.sweep import Sweep
from loadtest.targets import LlmTarget, PolicyTarget, authorised, check_llm, check_policy

_SCRAPE_S = 1.0


class Watcher(Protocol):
    """Who is told how the run goes."""

    def say(self, text: str) -> None:
        """A line for people."""
        ...

    def begin(self, title: str, duration_s: float) -> None:
        """A stage begins."""
        ...

    def progress(self, done_s: float, news: Sequence[News]) -> None:
        """How far it is, and what has come since the last call."""
        ...

    def end(self) -> None:
        """The stage is over."""
        ...


@dataclass
class _Gathered:
    """Records on their way to the file, and what the watcher has not heard of yet."""

    writer: RecordWriter
    fresh: list[News] = field(default_factory=list[News])

    def take(self, news: News) -> None:
        self.writer.write_lines(news.lines)
        self.fresh.append(news)


def run_load_test(plan: Plan, watcher: Watcher) -> Summary:
    """Runs a plan and writes ``summary.json``, the records, the server's metrics and ``report.html``.

    Args:
        plan: What to do.
        watcher: Is told how it goes.

    Returns:
        The summary.

    Raises:
        UsageError: What was asked for cannot be done.
        DeadServerError: A server does not answer, or is not of the kind that was asked for.
    """
    prepare_output(plan.output)
    llm = check_llm(plan.llm, timeout_s=plan.llm_load.timeout_s) if plan.llm and plan.llm_load else None
    policy = check_policy(plan.policy) if plan.policy else None
    ceilings = _ceilings(plan, llm, policy, watcher)
    started = datetime.now(UTC)
    scrapers = _scrapers(plan)
    with RecordWriter(plan.output, plan.records) as writer:
        gathered = _Gathered(writer)
        with Leader(plan, llm, policy, on_records=gathered.take, on_wait=watcher.say) as leader:
            scraping = gevent.spawn(_scrape, scrapers)
            try:
                if plan.sweep is not None:
                    stages, best, early = _sweep(plan, leader, gathered, watcher)
                else:
                    stages, best, early = (
                        [],
                        None,
                        _stage(plan, leader, gathered, watcher, 0, plan.llm_load, plan.policy_load),
                    )
            finally:
                scraping.kill()
        records = writer.read()
    summary = _summarise(plan, records, stages, best, early, ceilings)
    summary.started_at = started.isoformat(timespec="seconds")
    for scraper in scrapers:
        summary.server |= scraper.summary()
    write_whole(plan.output / SUMMARY_FILE, summary.model_dump_json(indent=2) + "\n")
    write_report(plan.output, summary, records)
    return summary


def prepare_output(folder: Path) -> None:
    """Makes the folder; what an earlier run left there is replaced.

    Raises:
        UsageError: It cannot be written to, or holds something else.
    """
    known = {SUMMARY_FILE, SERVER_METRICS_FILE, "report.html", "records.jsonl", "records.parquet", "comparison.html"}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        others = sorted(path.name for path in folder.iterdir() if path.name not in known)
        if others:
            raise UsageError(
                f"output={str(folder)!r}: holds other files ({', '.join(others[:3])}); name another folder"
            )
        for path in folder.iterdir():
            path.unlink()
    except OSError as error:
        raise UsageError(f"output={str(folder)!r}: cannot be written to ({error.strerror})") from None


def _stage(
    plan: Plan,
    leader: Leader,
    gathered: _Gathered,
    watcher: Watcher,
    index: int,
    llm_load: LoadSettings | None,
    policy_load: LoadSettings | None,
) -> str | None:
    loads = [load for load in (llm_load, policy_load) if load is not None]
    duration_s = max(load.warmup_s + load.duration_s for load in loads)
    title = ", ".join(describe_load(load) for load in loads)
    watcher.begin(title, duration_s)
    began, told = time.monotonic(), 0.0

    def tick() -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= 0.25:
            told = now
            fresh, gathered.fresh = gathered.fresh, []
            watcher.progress(min(now - began, duration_s), fresh)

    try:
        return leader.run_stage(index, llm_load, policy_load, tick=tick)
    finally:
        watcher.end()


def describe_load(load: LoadSettings) -> str:
    """A load in a few words."""
    if load.mode == "closed":
        return f"{load.users} users"
    return f"{load.rate_per_s:.4g} requests/s ({load.arrival})"


def _sweep(
    plan: Plan, leader: Leader, gathered: _Gathered, watcher: Watcher
) -> tuple[list[Stage], float | None, str | None]:
    (load,) = plan.loads
    assert plan.sweep is not None
    sweep = Sweep(start=load.full, limit=plan.sweep.limit, precision=plan.sweep.precision, whole=load.mode == "closed")
    stages: list[Stage] = []
    early: str | None = None
    while (value := sweep.next_load()) is not None and early is None:
        index = len(stages)
        loaded = with_load(load, value)
        llm_load, policy_load = (loaded, None) if plan.llm is not None else (None, loaded)
        early = _stage(plan, leader, gathered, watcher, index, llm_load, policy_load)
        figures = _figures(plan, [record for record in gathered.writer.read() if record.stage == index])
        holds = early is None and all(slo.check(figures).holds for slo in plan.slos)
        sweep.observe(value, holds=holds)
        stages.append(Stage(load=value, holds=holds, figures=figures))
        watcher.say(f"{describe_load(loaded)}: {'holds' if holds else 'does not hold'}")
        if early is not None and not early.startswith("stopped"):
            early = None  # a load that breaks the server is an answer like any other
    return stages, sweep.best, early


def _figures(plan: Plan, records: Sequence[RequestRecord], part: Part | None = None) -> Figures:
    control = plan.policy is not None and plan.policy.control_hz is not None
    return compute_figures(records, limits=request_limits(plan.slos, part), control=control)


def _summarise(
    plan: Plan,
    records: Sequence[RequestRecord],
    stages: list[Stage],
    best: float | None,
    early: str | None,
    ceilings: dict[str, float],
) -> Summary:
    parts: dict[str, Figures] = {}
    if plan.is_mixed:
        parts["llm"] = _figures(plan, [record for record in records if record.kind != "act"], "llm")
        parts["policy"] = _figures(plan, [record for record in records if record.kind == "act"], "policy")
    if stages:
        chosen = next((stage for stage in stages if stage.load == best), stages[-1])
        figures = chosen.figures
    else:
        figures = _figures(plan, records)
    targets = [target.url for target in (plan.llm, plan.policy) if target is not None]
    generator = _generator_figures(plan, records, figures, parts, ceilings)
    summary = Summary(
        kind=cast("Literal['llm', 'policy', 'mixed']", plan.kind),
        target=" and ".join(targets),
        started_at="",
        command=plan.command,
        settings=plan.shown(),
        figures=figures,
        parts=parts,
        stages=stages,
        best_load=best,
        slos=[slo.check(figures if slo.part is None else parts[slo.part]) for slo in plan.slos],
        generator=generator,
        stopped_early=early,
    )
    summary.notes = list(_notes(summary))
    return summary


def _generator_figures(
    plan: Plan,
    records: Sequence[RequestRecord],
    figures: Figures,
    parts: dict[str, Figures],
    ceilings: dict[str, float],
) -> GeneratorFigures:
    is_open = any(load.mode == "open" for load in plan.loads)
    lags = [1e3 * (record.sent_s - record.intended_s) for record in records if not record.warmup] if is_open else []
    # Two servers share one generator: each takes its part of what the processes can do.
    each = parts or {plan.kind: figures}
    shares = [
        (part.num_requests / part.duration_s) / ceilings[name]
        for name, part in each.items()
        if ceilings.get(name) and part.duration_s > 0
    ]
    return GeneratorFigures(
        num_processes=plan.num_generators,
        ceiling_per_s=min(ceilings.values(), default=None),
        share=sum(shares) if shares else None,
        num_not_sent=sum(record.error == "not_sent" for record in records if not record.warmup),
        send_lag_ms=Stats.of(lags),
    )


def _notes(summary: Summary) -> list[str]:
    notes: list[str] = []
    figures, generator = summary.figures, summary.generator
    if generator.is_limiting:
        notes.append(
            f"The generator ran at {100 * (generator.share or 0):.0f} % of its own ceiling "
            f"({generator.ceiling_per_s:.0f} requests/s; from {100 * NEAR_CEILING:.0f} % on the figures may be its own "
            "and not the server's): give it more --processes where it has more users, or another machine."
        )
    if generator.num_not_sent:
        notes.append(
            f"{generator.num_not_sent} requests were not sent, as too many were in flight (--max-in-flight): the "
            "server does not keep up with this rate."
        )
    if figures.num_counted_by_chunks:
        notes.append(
            f"{figures.num_counted_by_chunks} answers came without usage: each chunk was counted as one token."
        )
    if not figures.num_requests:
        notes.append("No request was measured: the run ended within its warm-up.")
    return notes


def _ceilings(plan: Plan, llm: LlmTarget | None, policy: PolicyTarget | None, watcher: Watcher) -> dict[str, float]:
    if not plan.measure_ceiling:
        return {}
    watcher.say("measuring how much this generator can send at all ...")
    found: dict[str, float] = {}
    for name, target in (("llm", llm), ("policy", policy)):
        if target is not None:
            found[name] = measure_ceiling(target, num_processes=plan.num_generators, users=_users_of(plan, name))
            watcher.say(f"the generator's ceiling: {found[name]:,.0f} requests/s with {plan.num_generators} processes")
    return found


def _users_of(plan: Plan, name: str) -> int | None:
    """Users who wait for their answers all the time; None where the load says another number than that."""
    load = plan.llm_load if name == "llm" else plan.policy_load
    paced = name == "policy" and plan.policy is not None and plan.policy.control_hz is not None
    if load is None or load.mode == "open" or plan.sweep is not None or paced:
        return None
    return load.most_users


def _scrapers(plan: Plan) -> list[Scraper]:
    targets = [target for target in (plan.llm, plan.policy) if target is not None]
    return [
        Scraper(
            target.url,
            plan.output / SERVER_METRICS_FILE,
            headers=authorised(target.headers, target.api_key),
        )
        for target in targets
    ]


def _scrape(scrapers: Sequence[Scraper]) -> None:
    while True:
        for scraper in scrapers:
            scraper.sample()
        gevent.sleep(_SCRAPE_S)
