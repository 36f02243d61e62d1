"""Runs a load test or a comparison for the command line, and says how it went by the exit code."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from loadtest.compare import COMPARISON_FILE, compare, write_comparison
from loadtest.console import ConsoleWatcher, show_comparison, show_summary
from loadtest.errors import DeadServerError, UsageError
from loadtest.options import parse_address
from loadtest.plan import Plan
from loadtest.run import run_load_test

HELD, ENDED_EARLY, WRONG, NOT_HELD, INTERRUPTED, TERMINATED = 0, 1, 2, 3, 130, 143


def run_command(make_plan: Callable[[], Plan]) -> int:
    """Runs a load test.

    Args:
        make_plan: From the options to the plan; may raise UsageError.

    Returns:
        0 every SLO holds; 3 one does not; 2 what was asked for cannot be done, or the server does not answer; 1 the run
        ended before its time; 130 stopped by Ctrl-C, 143 by SIGTERM.
    """
    told, shown = Console(stderr=True), Console()
    try:
        plan = make_plan()
        summary = run_load_test(plan, ConsoleWatcher(told))
    except (UsageError, DeadServerError) as error:
        told.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return WRONG
    except KeyboardInterrupt:
        return INTERRUPTED
    show_summary(shown, summary)
    shown.print(f"report: {plan.output / 'report.html'}", highlight=False, soft_wrap=True)
    stops = {"stopped by Ctrl-C": INTERRUPTED, "stopped by SIGTERM": TERMINATED}
    if summary.stopped_early in stops:
        return stops[summary.stopped_early]
    if not summary.holds:
        return NOT_HELD
    return ENDED_EARLY if summary.stopped_early is not None else HELD


def compare_command(before: Path, after: Path, *, output: Path | None, fail_on_regression: bool) -> int:
    """Compares two output folders.

    Returns:
        0; 3 with ``fail_on_regression`` when a figure is worse by more than noise; 2 when they cannot be compared.
    """
    told, shown = Console(stderr=True), Console()
    page = output if output is not None else after / COMPARISON_FILE
    names = (str(before), str(after))
    try:
        comparison = compare(before, after)
        write_comparison(page, comparison, names)
    except UsageError as error:
        told.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return WRONG
    except OSError as error:
        told.print(f"error: {page}: cannot be written ({error.strerror})", style="red", markup=False, highlight=False)
        return WRONG
    show_comparison(shown, comparison, names)
    shown.print(f"page: {page}", highlight=False, soft_wrap=True)
    return NOT_HELD if fail_on_regression and comparison.is_worse else HELD


def worker_command(address: str) -> int:
    """Sends requests for a load test that runs elsewhere, until that one ends.

    Returns:
        0; 2 when there is none at the address.
    """
    told = Console(stderr=True)
    try:
        host, port = parse_address(address)
        socket.create_connection((host, port), timeout=10).close()
    except (UsageError, OSError) as error:
        told.print(
            f"error: {address}: {error}; start the load test there first, with --bind and --expect-workers",
            style="red",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        return WRONG
    from loadtest.worker import join_run

    return join_run(host, port)
