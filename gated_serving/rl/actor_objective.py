"""What the actor minimises: the critic's energy turned round, with or without an entropy term.

Source: "1000 Layer Networks for Self-Supervised RL" (arXiv 2503.14858), section 3, and its released code; the learned
temperature is that of "Soft Actor-Critic Algorithms and Applications" (arXiv 1812.05905), equation 18.

Legend: ``B`` batch.
"""

from __future__ import annotations

from torch import Tensor


def actor_loss(energy: Tensor, log_prob: Tensor, log_alpha: Tensor | None) -> Tensor:
    """``mean(alpha log pi(a|s,g) - f(s,a,g))``; the temperature gets no gradient from it.

    Args:
        energy: The critic's energy of the sampled actions with their goals, ``[B]``.
        log_prob: Log-density of those actions, ``[B]``.
        log_alpha: Logarithm of the temperature, a scalar; None leaves the entropy term out.

    Returns:
        A scalar.

    Raises:
        ValueError: ``energy`` and ``log_prob`` differ in shape.
    """
    if energy.shape != log_prob.shape:
        raise ValueError(
            f"energy has shape {tuple(energy.shape)} and log_prob {tuple(log_prob.shape)}: must be one number an action"
        )
    if log_alpha is None:
        return -energy.mean()
    return (log_alpha.detach().exp() * log_prob - energy).mean()


def temperature_loss(log_prob: Tensor, log_alpha: Tensor, target_entropy: float) -> Tensor:
    """``alpha mean(-log pi - target)``: raises the temperature while the entropy is below its target.

    Only ``log_alpha`` gets a gradient.

    Args:
        log_prob: ``[B]``.
        log_alpha: Logarithm of the temperature, a scalar.
        target_entropy: In nats; the paper's is -0.5 times the action size.

    Returns:
        A scalar.
    """
    return log_alpha.exp() * (-log_prob.detach() - target_entropy).mean()
