from __future__ import annotations

from gated_serving.llm.serving.server_process import FAILURE_MARK, STAGE_MARK
from gated_serving.llm.serving.vllm_log import LogReader


def read(*lines: str) -> tuple[LogReader, list[str]]:
    reader = LogReader()
    shown = [text for line in lines if (text := reader.take(line)) is not None]
    return reader, shown


def record(level: str, message: str, process: str = "EngineCore") -> str:
    return f"({process} pid=12) {level} 12-01 00:59:38 [core.py:133] {message}"


def test_stages_come_from_marks_and_from_vllms_own_words() -> None:
    reader, shown = read(f"{STAGE_MARK}importing vLLM")
    assert (reader.stage, shown) == ("importing vLLM", [])
    reader.take(record("INFO", "Starting to load model /x..."))
    assert reader.stage == "loading weights"


def test_only_warnings_that_are_news_are_shown() -> None:
    _, shown = read(
        record("INFO", "Route: /health"),
        record("WARNING", "Triton is not installed. triton-cpu is expected on x86 CPUs."),
        record("WARNING", "--some-option is not supported here and is ignored"),
        "INFO:     127.0.0.1:1 - GET",
    )
    assert shown == ["vLLM warns: --some-option is not supported here and is ignored"]


def test_the_cause_is_the_innermost_exception_and_not_what_others_made_of_it() -> None:
    reader, _ = read(
        record("ERROR", "Traceback (most recent call last):"),
        record("ERROR", '  File "x.py", line 1, in f'),
        record("ERROR", "ValueError: the head size 24 is not supported"),
        "Traceback (most recent call last):",
        "RuntimeError: Engine core initialization failed. See root cause above.",
        f"{FAILURE_MARK}RuntimeError: Engine core initialization failed. See root cause above.",
    )
    assert reader.cause() == "ValueError: the head size 24 is not supported"


def test_a_validation_errors_findings_follow_its_first_line() -> None:
    reader, _ = read(
        f"{STAGE_MARK}configuring the model",
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "  Value error, max_model_len (9) is too large [type=value_error, input_value=...]",
        "    For further information visit https://example.org",
        f"{FAILURE_MARK}ValidationError: 1 validation error for ModelConfig",
    )
    assert reader.cause() == "max_model_len (9) is too large"
    assert reader.blames_options


def test_a_parsers_error() -> None:
    reader, _ = read("usage: gated-serving serve [-h]", "gated-serving serve: error: unrecognized arguments: --x")
    assert reader.option_error() == "unrecognized arguments: --x"


def test_without_an_exception_there_is_the_end_of_the_log() -> None:
    reader, _ = read(*(record("INFO", f"line {number}") for number in range(30)))
    assert reader.cause() is None
    assert reader.end().splitlines()[-1].strip() == "line 29"
