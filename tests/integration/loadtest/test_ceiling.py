"""What the generator can send at all, measured against a server that does nothing."""

from __future__ import annotations

import pytest

from loadtest.ceiling import measure_ceiling, spread
from loadtest.observations import ObservationField
from loadtest.settings import PolicySettings
from loadtest.targets import PolicyTarget

FIELDS = (ObservationField(name="observation", shape=(3,), dtype="float32", low=None, high=None),)


@pytest.mark.parametrize(
    ("users", "num_processes", "spread_over"),
    [
        (1, 1, (1, 1)),
        (1, 1000, (1, 1)),  # processes without a user send nothing
        (7, 2, (2, 4)),
        (64, 1, (1, 64)),
        (100_000, 2, (2, 256)),
        (None, 4, (4, 32)),
    ],
)
def test_a_closed_loop_is_measured_with_its_own_users(
    users: int | None, num_processes: int, spread_over: tuple[int, int]
) -> None:
    assert spread(users, num_processes) == spread_over


def test_a_control_rate_is_no_ceiling() -> None:
    settings = PolicySettings(url="http://127.0.0.1:1", policy="any", control_hz=1)
    target = PolicyTarget(settings=settings, fields=FIELDS)
    assert measure_ceiling(target, num_processes=1, seconds=0.5) > 10 * 32  # 32 users at 1 Hz would send 32 a second
