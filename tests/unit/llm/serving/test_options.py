from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from gated_serving.llm.serving.errors import UsageError
from gated_serving.llm.serving.option_table import check_options, read_table, write_table
from gated_serving.llm.serving.options import ServeSettings, read_command, split_model

TABLE = {
    "--max-model-len": True,
    "--enforce-eager": False,
    "--no-enforce-eager": False,
    "--dtype": True,
    "--seed": True,
    "-tp": True,
}


def read(*tokens: str, table: dict[str, bool] | None = TABLE, **own) -> ServeSettings:
    settings = {"host": None, "port": None, "api_keys": [], "verbose": False, "default_model": "shipped", **own}
    return read_command(tokens, table=table, **settings)


def test_defaults() -> None:
    settings = read()
    assert (settings.model, settings.host, settings.port, settings.vllm_options) == ("shipped", "127.0.0.1", 8000, ())


@pytest.mark.parametrize("table", [TABLE, None])
def test_the_model_may_stand_before_or_behind_options_that_take_a_value(table: dict[str, bool] | None) -> None:
    for tokens in (["M", "--max-model-len", "64"], ["--max-model-len", "64", "M"], ["--max-model-len=64", "M"]):
        settings = read(*tokens, table=table)
        assert settings.model == "M"
        assert settings.value("--max-model-len") == "64"


def test_a_flag_takes_no_value_once_the_options_are_known() -> None:
    assert split_model(["--enforce-eager", "M"], TABLE) == ("M", ("--enforce-eager",))


def test_vllms_spelling_of_the_model() -> None:
    assert read("--model", "M", "--dtype", "float32").model == "M"
    assert read("--model=M").model == "M"
    with pytest.raises(UsageError, match="two models"):
        read("M", "--model", "N")


def test_underscores_and_negative_values() -> None:
    settings = read("M", "--max_model_len=64", "--seed", "-1")
    assert settings.value("--max-model-len") == "64"
    assert settings.value("--seed") == "-1"


def test_the_last_of_an_option_counts() -> None:
    assert read("M", "--dtype", "float32", "--dtype", "bfloat16").value("--dtype") == "bfloat16"


@pytest.mark.parametrize("port", [-1, 65536])
def test_ports_out_of_range(port: int) -> None:
    with pytest.raises(UsageError, match=str(port)):
        read("M", port=port)


def test_keys_are_not_shown_in_the_settings_text() -> None:
    assert "secret" not in repr(read("M", api_keys=["secret"]))
    with pytest.raises(UsageError, match="api-key"):
        read("M", api_keys=[""])


def test_a_config_file_sets_what_is_not_typed(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(
        "model: M\nport: 9001\nhost: 0.0.0.0\napi-key: k\nmax_model_len: 64\nenforce-eager: false\nseed: 3\n"
        "speculative-config:\n  method: ngram\n"
    )
    settings = read("--config", str(path), "--seed", "4")
    assert (settings.model, settings.port, settings.host, settings.api_keys) == ("M", 9001, "0.0.0.0", ("k",))
    assert settings.value("--max-model-len") == "64"
    assert settings.has("--no-enforce-eager")
    assert settings.value("--seed") == "4"
    assert settings.value("--speculative-config") == '{"method": "ngram"}'
    assert read("--config", str(path), port=9002).port == 9002


def test_a_config_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read("--config", str(tmp_path / "absent.yaml"))
    path = tmp_path / "list.yaml"
    path.write_text("- a\n")
    with pytest.raises(UsageError, match="mapping"):
        read("--config", str(path))


def test_unknown_options_are_named_with_the_nearest() -> None:
    check_options(["--max_model_len=5", "--dty", "float32", "--max-model-len.x", "-1", "-tp", "2", "-O3"], TABLE)
    with pytest.raises(UsageError, match="--max-modle-len; did you mean --max-model-len"):
        check_options(["--max-modle-len", "5"], TABLE)


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("--maxmodel-len", "; did you mean --max-model-len?"),
        ("--no-enforce-eagre", "; did you mean --no-enforce-eager?"),
        ("--max-len", ""),
        ("--model-name", ""),
        ("--speed-up", ""),
        ("--dtypes-of-all", ""),
    ],
)
def test_only_truly_close_options_are_hinted_at(typed: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_options([typed], TABLE)
    assert str(refused.value) == f"no such option: {typed}{hint}"


def test_the_table_of_options_is_kept_by_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    parser = argparse.ArgumentParser()
    parser.add_argument("--long", "-l", type=int)
    parser.add_argument("--flag", action="store_true")
    assert read_table("1.0") is None
    write_table("1.0", parser)
    assert read_table("1.0") == {"-h": False, "--help": False, "--long": True, "-l": True, "--flag": False}
    assert read_table("1.1") is None
    next(tmp_path.rglob("*.json")).write_text("[broken")
    assert read_table("1.0") is None
