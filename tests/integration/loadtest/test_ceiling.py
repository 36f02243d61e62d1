"""What the generator can send at all, measured against a server that does nothing."""

from __future__ import annotations

from loadtest.ceiling import measure_ceiling
from loadtest.observations import ObservationField
from loadtest.settings import PolicySettings
from loadtest.targets import PolicyTarget

FIELDS = (ObservationField(name="observation", shape=(3,), dtype="float32", low=None, high=None),)


def ceiling(*, users: int | None, num_processes: int = 1, control_hz: float | None = None) -> float:
    settings = PolicySettings(url="http://127.0.0.1:1", policy="any", control_hz=control_hz)
    target = PolicyTarget(settings=settings, fields=FIELDS)
    return measure_ceiling(target, num_processes=num_processes, users=users, seconds=0.5)


def test_one_user_who_waits_for_each_answer_is_below_many() -> None:
    assert ceiling(users=1) < 0.8 * ceiling(users=None)


def test_a_control_rate_is_no_ceiling() -> None:
    assert ceiling(users=None, control_hz=1) > 10 * 32


def test_processes_without_a_user_do_not_count() -> None:
    assert ceiling(users=1, num_processes=1000) < 10 * ceiling(users=1)
