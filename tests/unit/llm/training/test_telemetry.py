from __future__ import annotations

import pytest

from gated_serving.llm.training.telemetry import describe_progress


@pytest.mark.parametrize(
    ("step", "values", "line"),
    [
        (10, {"loss": 2.5, "lr": 1e-3, "tokens_per_s": 2048.0},
         "step 10/110, 20,480 tokens, loss 2.5000, 2,048 tokens/s, 0:01:40 left"),
        (10, {"loss": 2.5, "tokens_per_s": 32.0}, "step 10/110, 20,480 tokens, loss 2.5000, 32 tokens/s, 1:46:40 left"),
        (110, {"eval_loss": 3.25}, "step 110/110, 225,280 tokens, held-out loss 3.2500"),
    ],
)  # fmt: skip
def test_a_line_of_the_log(step: int, values: dict[str, float], line: str) -> None:
    assert describe_progress(step, 110, 2048, values) == line
