"""The page that a load test leaves behind."""

from loadtest.report.page import REPORT_FILE, write_report

__all__ = ["REPORT_FILE", "write_report"]
