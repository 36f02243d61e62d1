"""Reading vLLM's log for the person who started the server: stages, warnings that matter, and causes of failure."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field

from gated_serving.llm.serving.server_process import CONFIGURING, FAILURE_MARK, READING_OPTIONS, STAGE_MARK

KEPT_LINES = 600
SHOWN_LINES = 20
_RECORD = re.compile(
    r"^(?:\((?P<process>[\w-]+) pid=\d+\) )?(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) "
    r"\d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?(?P<message>.*)$"
)
_PROCESS = re.compile(r"^\([\w-]+ pid=\d+\) ")
_CAUSE = re.compile(r"^(?:[\w.]+\.)?(?P<kind>[A-Z]\w*(?:Error|Exception|Interrupt|Exit)): (?P<message>.+)$")
# What the chain of processes says after the one that failed; never the cause.
_CONSEQUENCES = ("Engine core initialization failed", "WorkerProc initialization failed", "Engine core proc")
# Stages that only vLLM's log tells of.
_STAGES = (
    ("Starting to load model", "loading weights"),
    ("Start compiling", "compiling"),
    ("Warming up model", "warming up"),
    ("Starting vLLM server", "starting the API"),
)
# Warnings of every start on a CPU, or about what this project chose itself.
_USUAL = re.compile(
    r"Triton is (?:not )?installed|triton-cpu|Reset SSM cache|Model Runner V2|ulimit|Enforce eager|Inductor compilation"
    r"|not found in LD_PRELOAD|Attempted to load weight|global random seed|VLLM_ENABLE_V1_MULTIPROCESSING|NUMA binding"
    r"|force killing|default sampling parameters|OMP_NUM_THREADS|No model-specific|cache_salt|\[shutdown\]"
)


@dataclass
class LogReader:
    """Takes the log line by line and keeps its end.

    Attributes:
        stage: What vLLM is doing, as last heard.
    """

    stage: str = "starting Python"
    _lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    _failure: str | None = None

    def take(self, line: str) -> str | None:
        """Read one line.

        Returns:
            What the reader should see of it, or None.
        """
        if line.startswith(STAGE_MARK):
            self.stage = line.removeprefix(STAGE_MARK)
            return None
        if line.startswith(FAILURE_MARK):
            self._failure = line.removeprefix(FAILURE_MARK)
            return None
        self._lines.append(line)
        record = _RECORD.match(line)
        if record is None:
            return None
        message = record["message"]
        self.stage = next((stage for start, stage in _STAGES if message.startswith(start)), self.stage)
        if record["level"] == "WARNING" and not _USUAL.search(message):
            return f"vLLM warns: {message}"
        if record["level"] in ("ERROR", "CRITICAL") and not message.startswith(" ") and "Traceback" not in message:
            return f"vLLM: {message}"
        return None

    def option_error(self) -> str | None:
        """What vLLM's parser said of a wrong option, if it did."""
        for line in reversed(self._lines):
            if line.startswith("gated-serving serve: error: "):
                return line.removeprefix("gated-serving serve: error: ")
            if ": error: " in line and "vllm" not in line.split(": error: ")[0].lower():
                return line.split(": error: ", 1)[1]
        return None

    def cause(self) -> str | None:
        """The exception behind a failure, in a line or few; of all processes the innermost one's own."""
        lines = [_bare(line) for line in self._lines]
        found: str | None = None
        for index, line in enumerate(lines):
            match = _CAUSE.match(line)
            if match is None or match["message"].startswith(_CONSEQUENCES):
                continue
            details = _validation_details(lines[index + 1 :]) if match["kind"] == "ValidationError" else []
            found = "\n  ".join(details) or f"{match['kind']}: {match['message']}"
        return found or self._failure

    @property
    def blames_options(self) -> bool:
        """Whether vLLM ended because a value it was given is wrong."""
        return (
            self.stage in (READING_OPTIONS, CONFIGURING)
            and bool(self._failure)
            and "ValidationError" in str(self._failure)
        )

    def end(self) -> str:
        """The last lines of the log, without processes' names."""
        return "\n".join(f"    {_bare(line)}" for line in list(self._lines)[-SHOWN_LINES:])


def _validation_details(lines: list[str]) -> list[str]:
    """The findings that follow a validation error's first line, without pydantic's own remarks."""
    details: list[str] = []
    for line in lines:
        if not line.startswith(" "):
            break
        text = line.strip().removeprefix("Value error, ").split(" [type=")[0]
        if text not in details and not text.startswith("For further information"):
            details.append(text)
    return details


def _bare(line: str) -> str:
    """A line's text without process, level, time and place."""
    record = _RECORD.match(line)
    return record["message"] if record else _PROCESS.sub("", line)
