import numpy as np
import pytest

from gated_serving.rl.hindsight import draw_offsets
from gated_serving.rl.hindsight_reference import goal_probabilities


def test_reference_on_a_case_worked_out_by_hand():
    # Two steps, then three. With gamma 1/2 the weights ahead are 1/2, 1/4, 1/8.
    expected = [
        [2 / 3, 1 / 3, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 0, 4 / 7, 2 / 7, 1 / 7],
        [0, 0, 0, 2 / 3, 1 / 3],
        [0, 0, 0, 0, 1],
    ]
    np.testing.assert_allclose(goal_probabilities([2, 3], 0.5), expected)


@pytest.mark.parametrize("gamma", [0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("num_future", [1, 2, 7, 40])
def test_offsets_follow_the_truncated_geometric_distribution(gamma: float, num_future: int):
    num_draws = 40_000
    rng = np.random.default_rng(7)
    offsets = draw_offsets(np.full(num_draws, num_future), gamma, rng)
    assert offsets.min() >= 1
    assert offsets.max() <= num_future
    expected = num_draws * goal_probabilities([num_future], gamma)[0]
    observed = np.bincount(offsets - 1, minlength=num_future)
    assert _is_plausible(observed, expected)


def test_the_test_of_the_distribution_tells_a_wrong_one():
    rng = np.random.default_rng(7)
    offsets = draw_offsets(np.full(40_000, 40), 0.97, rng)
    assert not _is_plausible(np.bincount(offsets - 1, minlength=40), 40_000 * goal_probabilities([40], 0.99)[0])


def test_a_draw_just_below_1_stays_inside_the_episode():
    class Extreme:
        def random(self, size: int) -> np.ndarray:
            return np.full(size, np.nextafter(1.0, 0.0))

    num_future = np.arange(1, 2000)
    for gamma in (1e-6, 0.5, 0.99, 1 - 1e-12, 1.0):
        offsets = draw_offsets(num_future, gamma, Extreme())
        assert (offsets >= 1).all()
        assert (offsets <= num_future).all()


def _is_plausible(observed: np.ndarray, expected: np.ndarray) -> bool:
    """Chi-square below the mean of its distribution plus five standard deviations; rare cells are put together."""
    common = expected >= 5
    observed = np.append(observed[common], observed[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    degrees = max(1, len(expected) - 1)
    return bool(((observed - expected) ** 2 / expected).sum() < degrees + 5 * np.sqrt(2 * degrees))
