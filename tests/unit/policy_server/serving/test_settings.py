"""Settings: where they come from, and errors that name the field."""

from __future__ import annotations

import pytest

from policy_server.engines import check_engine
from policy_server.errors import StartError
from policy_server.settings import make_settings


def test_options_win_over_the_environment_and_it_over_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATED_SERVING_POLICY_PORT", "9000")
    monkeypatch.setenv("GATED_SERVING_POLICY_WORKERS", "3")
    monkeypatch.setenv("GATED_SERVING_POLICY_BATCHING__MAX_BATCH", "7")
    settings = make_settings(port=9001)
    assert (settings.port, settings.workers, settings.batching.max_batch, settings.host) == (9001, 3, 7, "127.0.0.1")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"port": 70_000}, "port=70000"),
        ({"workers": 0}, "workers=0"),
        ({"prot": 1}, "prot"),
        ({"engine": {"engine": "abacus"}}, "engine.engine='abacus'"),
        ({"batching": {"max_batch": -1}}, "batching.max_batch=-1"),
        ({"engine": {"batch_buckets": [4, 2]}}, "batch_buckets"),
    ],
)
def test_a_wrong_value_is_named(values: dict[str, object], words: str) -> None:
    with pytest.raises(StartError, match=words) as refused:
        make_settings(**values)
    assert refused.value.exit_code == 2


def test_a_wrong_key_is_not_shown() -> None:
    with pytest.raises(StartError, match="API key") as refused:
        make_settings(api_keys=["my secret"])
    assert "my secret" not in str(refused.value)


@pytest.mark.parametrize("engine", ["cuda", "tensorrt"])
def test_an_engine_that_is_not_here_says_what_to_install(engine: str) -> None:
    import onnxruntime

    if len(onnxruntime.get_available_providers()) > 2:
        pytest.skip("this onnxruntime is the GPU build")
    with pytest.raises(StartError, match=r"gated-serving\[policy-gpu\]") as refused:
        check_engine(engine)
    assert refused.value.exit_code == 3
