"""wrk as the client: a closed loop over so many connections."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

_UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4}


@dataclass(frozen=True)
class Load:
    """What one run of wrk measured.

    Attributes:
        requests_per_s: Answers with status 200 a second.
        p50_ms: Median latency.
        p99_ms: 99th percentile.
        errors: Answers of another status, and broken connections.
    """

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    errors: int


def check_wrk() -> None:
    """Ends the script if wrk is not there."""
    if shutil.which("wrk") is None:
        sys.exit("wrk is not installed (Debian and Ubuntu: apt-get install wrk)")


def load(url: str, body: dict[str, Any], *, connections: int, seconds: float) -> Load:
    """Sends the same body again and again."""
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        quoted = json.dumps(json.dumps(body))
        script.write(f'wrk.method = "POST"\nwrk.headers["Content-Type"] = "application/json"\nwrk.body = {quoted}\n')
        script.flush()
        command = [
            "wrk",
            "-t1",
            f"-c{connections}",
            f"-d{seconds:g}s",
            "--latency",
            "--timeout",
            "10s",
            "-s",
            script.name,
            url,
        ]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return parse(text)


def parse(text: str) -> Load:
    """Reads wrk's report."""
    bad = re.search(r"Non-2xx or 3xx responses: (\d+)", text)
    broken = re.search(r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)", text)
    errors = (int(bad[1]) if bad else 0) + (sum(map(int, broken.groups())) if broken else 0)
    rate = re.search(r"Requests/sec:\s+([\d.]+)", text)
    count = re.search(r"(\d+) requests in ", text)
    assert rate is not None, text
    assert count is not None, text
    # wrk's own rate counts answers of every status.
    good = 1.0 - (int(bad[1]) if bad else 0) / max(1, int(count[1]))
    return Load(float(rate[1]) * good, _percentile(text, "50%"), _percentile(text, "99%"), errors)


def _percentile(text: str, name: str) -> float:
    found = re.search(rf"{name}\s+([\d.]+)(us|ms|s|m)", text)
    assert found is not None, text
    return float(found[1]) * _UNITS[found[2]]


def wrk_version() -> str:
    """Wrk's own version."""
    text = subprocess.run(["wrk", "-v"], capture_output=True, text=True, check=False).stdout
    return (re.search(r"wrk (\S+)", text) or ["", "?"])[1]
