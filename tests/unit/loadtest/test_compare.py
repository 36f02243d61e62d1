"""Two runs side by side: what is noise, and what is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from load_records import act_record, act_records, chat_record, summary_of

from loadtest.compare import Comparison, compare, write_comparison
from loadtest.errors import UsageError
from loadtest.record_file import RecordWriter
from loadtest.records import RequestRecord
from loadtest.summary import SUMMARY_FILE


def keep(folder: Path, records: list[RequestRecord], **fields: object) -> Path:
    folder.mkdir()
    with RecordWriter(folder) as writer:
        writer.write(records)
    (folder / SUMMARY_FILE).write_text(summary_of(records, **fields).model_dump_json())
    return folder


def verdicts(comparison: Comparison) -> dict[str, str]:
    return {change.name: change.verdict for change in comparison.changes}


def test_the_same_server_twice_is_mostly_within_noise(tmp_path: Path) -> None:
    found: list[str] = []
    for seed in range(20):
        before = keep(tmp_path / f"before{seed}", act_records(1000, seed=2 * seed))
        after = keep(tmp_path / f"after{seed}", act_records(1000, seed=2 * seed + 1))
        found += verdicts(compare(before, after)).values()
    # Each figure has a chance of 1 in 20 to look real, fewer with the smallest change that counts.
    assert found.count("within noise") >= 0.9 * len(found)


def test_a_slower_server_is_found_out(tmp_path: Path) -> None:
    before = keep(tmp_path / "before", act_records(2000, mean_ms=5.0, seed=0))
    after = keep(tmp_path / "after", act_records(2000, mean_ms=6.0, seed=1, rate_per_s=80.0))
    comparison = compare(before, after)
    found = verdicts(comparison)
    assert found["mean latency, ms"] == found["p50 latency, ms"] == found["requests/s"] == "worse"
    assert comparison.is_worse
    change = next(change for change in comparison.changes if change.name == "mean latency, ms")
    assert change.relative == pytest.approx(0.2, abs=0.05)
    assert change.low < change.after - change.before < change.high
    faster = compare(after, before)
    assert verdicts(faster)["mean latency, ms"] == verdicts(faster)["requests/s"] == "better"
    assert not faster.is_worse


def test_failures_count(tmp_path: Path) -> None:
    before = keep(tmp_path / "before", act_records(500))
    records = act_records(500)
    for record in records[::10]:
        record.error, record.latency_ms = "http_503", None
    after = keep(tmp_path / "after", records)
    assert verdicts(compare(before, after))["failed, share"] == "worse"


def test_language_models_are_compared_by_their_tokens(tmp_path: Path) -> None:
    folders = [
        keep(tmp_path / name, [chat_record(index * 0.1, [ttft, ttft + 10]) for index in range(100)])
        for name, ttft in (("before", 50.0), ("after", 80.0))
    ]
    found = verdicts(compare(*folders))
    assert found["mean TTFT, ms"] == "worse"
    assert found["mean ITL, ms"] == "within noise"
    assert "output tokens/s" in found


def test_different_settings_are_said_and_different_kinds_refused(tmp_path: Path) -> None:
    before = keep(tmp_path / "before", act_records(100))
    settings = summary_of(act_records(100)).settings
    settings["policy_load"]["users"] = 99
    after = keep(tmp_path / "after", act_records(100), settings=settings)
    assert compare(before, after).notes == ("policy_load.users: 8 in the first run, 99 in the second",)
    other = keep(tmp_path / "other", [chat_record(0, [1.0, 2.0])])
    with pytest.raises(UsageError, match=r"of kind policy, .* of kind llm"):
        compare(before, other)


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    before = keep(tmp_path / "before", act_records(100))
    with pytest.raises(UsageError, match="cannot be read"):
        compare(before, tmp_path / "none")
    empty = keep(tmp_path / "empty", [act_record(0, 5, warmup=True)])
    with pytest.raises(UsageError, match="holds no measured request"):
        compare(before, empty)


def test_all_failed_is_compared_by_what_there_is(tmp_path: Path) -> None:
    before = keep(tmp_path / "before", act_records(100))
    after = keep(tmp_path / "after", [act_record(index * 0.01, 1, error="timeout") for index in range(100)])
    comparison = compare(before, after)
    assert verdicts(comparison) == {"failed, share": "worse"}
    write_comparison(tmp_path / "page.html", comparison, ("before", "after"))


def test_the_page_is_written(tmp_path: Path) -> None:
    before = keep(tmp_path / "before", act_records(300))
    after = keep(tmp_path / "after", act_records(300, mean_ms=9.0))
    page = tmp_path / "page.html"
    write_comparison(page, compare(before, after), ("<b>one</b>", "two"))
    text = page.read_text()
    assert "worse" in text
    assert "<b>one</b>" not in text.split("</script>")[-2]
