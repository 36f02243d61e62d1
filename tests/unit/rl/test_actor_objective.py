import math

import pytest
import torch

from gated_serving.rl.actor_objective import actor_loss, temperature_loss
from gated_serving.rl.contrastive_reference import reference_actor_loss, reference_temperature_loss

ENERGY = torch.tensor([-1.0, -3.0], dtype=torch.float64)
LOG_PROB = torch.tensor([0.5, -1.5], dtype=torch.float64)
LOG_ALPHA = torch.tensor(math.log(2), dtype=torch.float64)


def leaf(value: torch.Tensor) -> torch.Tensor:
    return value.clone().requires_grad_()


def test_losses_worked_out_by_hand() -> None:
    # alpha 2: (2 * 0.5 + 1) and (2 * -1.5 + 3), in the mean 1; without entropy (1 + 3) / 2
    assert actor_loss(ENERGY, LOG_PROB, LOG_ALPHA).item() == pytest.approx(1.0)
    assert actor_loss(ENERGY, LOG_PROB, None).item() == pytest.approx(2.0)
    # entropies -0.5 and 1.5 lie 1.5 and 3.5 above a target of -2: 2 * 2.5
    assert temperature_loss(LOG_PROB, LOG_ALPHA, -2.0).item() == pytest.approx(5.0)


@pytest.mark.parametrize("log_alpha", [LOG_ALPHA, None], ids=["entropy", "no entropy"])
def test_the_actor_loss_equals_the_reference(log_alpha: torch.Tensor | None) -> None:
    results = []
    for function in (actor_loss, reference_actor_loss):
        energy, log_prob = leaf(torch.linspace(-4, 1, 7)), leaf(torch.linspace(2, -3, 7))
        loss = function(energy, log_prob, log_alpha)
        loss.backward()
        results.append((loss.detach(), energy.grad, torch.zeros(7) if log_prob.grad is None else log_prob.grad))
    torch.testing.assert_close(*results)


def test_the_temperature_loss_equals_the_reference() -> None:
    results = []
    for function in (temperature_loss, reference_temperature_loss):
        log_alpha = leaf(LOG_ALPHA)
        loss = function(torch.linspace(2, -3, 7, dtype=torch.float64), log_alpha, -1.25)
        loss.backward()
        results.append((loss.detach(), log_alpha.grad))
    torch.testing.assert_close(*results)


def test_gradients_equal_finite_differences() -> None:
    assert torch.autograd.gradcheck(
        lambda energy, log_prob: actor_loss(energy, log_prob, LOG_ALPHA), (leaf(ENERGY), leaf(LOG_PROB))
    )
    assert torch.autograd.gradcheck(lambda value: temperature_loss(LOG_PROB, value, -2.0), (leaf(LOG_ALPHA),))


@pytest.mark.parametrize(("target", "sign"), [(3.0, -1), (-3.0, 1)])
def test_the_temperature_rises_below_the_target_entropy_and_falls_above(target: float, sign: int) -> None:
    log_alpha = leaf(LOG_ALPHA)  # the mean entropy is 0.5
    temperature_loss(LOG_PROB, log_alpha, target).backward()
    assert math.copysign(1, log_alpha.grad.item()) == sign


def test_actor_and_temperature_get_no_gradient_from_each_others_loss() -> None:
    energy, log_prob, log_alpha = leaf(ENERGY), leaf(LOG_PROB), leaf(LOG_ALPHA)
    actor_loss(energy, log_prob, log_alpha).backward()
    assert log_alpha.grad is None
    log_prob.grad = None
    temperature_loss(log_prob, log_alpha, -2.0).backward()
    assert log_prob.grad is None


def test_energies_that_do_not_match_the_densities_are_refused() -> None:
    """[B, 1] against [B] would broadcast to every pair."""
    with pytest.raises(ValueError, match=r"energy has shape \(2, 1\) and log_prob \(2,\)"):
        actor_loss(ENERGY[:, None], LOG_PROB, LOG_ALPHA)
