"""The contrastive energies and losses written pair by pair from the papers' equations: slow, and meant to be read.

Tests compare ``contrastive.py`` and ``actor_objective.py`` with this. Legend: ``B`` batch, ``R`` representation size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gated_serving.rl.contrastive import ContrastiveLoss, ContrastiveSettings, Energy


def reference_energy(phi: Tensor, psi: Tensor, settings: ContrastiveSettings) -> Tensor:
    """The energy of one state and action with one goal.

    Args:
        phi: ``[R]``.
        psi: ``[R]``.
        settings: Energy, temperature and epsilon.

    Returns:
        A scalar.
    """
    if settings.energy is Energy.L2:
        energy = -torch.sqrt(((phi - psi) ** 2).sum() + settings.l2_epsilon)
    else:
        energy = (phi * psi).sum()
        if settings.energy is Energy.COSINE:
            energy = energy / (torch.sqrt((phi**2).sum()) * torch.sqrt((psi**2).sum()))
    return energy / settings.temperature


def reference_logits(phi: Tensor, psi: Tensor, settings: ContrastiveSettings) -> Tensor:
    """Every pair's energy, ``[B, B]``, of ``[B, R]`` each: rows from ``phi``, columns from ``psi``."""
    return torch.stack([torch.stack([reference_energy(row, column, settings) for column in psi]) for row in phi])


def reference_contrastive_loss(logits: Tensor, settings: ContrastiveSettings) -> Tensor:
    """The loss and its penalty, from probabilities.

    With f the logits: forward InfoNCE is the mean over i of ``-log(exp f_ii / sum_j exp f_ij)``, backward InfoNCE of
    ``-log(exp f_ii / sum_j exp f_ji)``; symmetric InfoNCE is their sum and NT-Xent, over the 2B anchors of both sides,
    their mean; binary NCE is ``-mean_i log s(f_ii) - mean_{i != j} log(1 - s(f_ij))`` with s the logistic function.

    Args:
        logits: ``[B, B]``.
        settings: Loss and penalty.

    Returns:
        A scalar.
    """
    size = len(logits)
    forward = [-torch.log(logits[i, i].exp() / logits[i, :].exp().sum()) for i in range(size)]
    backward = [-torch.log(logits[i, i].exp() / logits[:, i].exp().sum()) for i in range(size)]
    if settings.loss is ContrastiveLoss.FORWARD_INFONCE:
        loss = _mean(forward)
    elif settings.loss is ContrastiveLoss.BACKWARD_INFONCE:
        loss = _mean(backward)
    elif settings.loss is ContrastiveLoss.SYMMETRIC_INFONCE:
        loss = _mean(forward) + _mean(backward)
    elif settings.loss is ContrastiveLoss.NT_XENT:
        loss = _mean(forward + backward)
    else:
        probability = 1 / (1 + torch.exp(-logits))
        positive = [-torch.log(probability[i, i]) for i in range(size)]
        negative = [-torch.log(1 - probability[i, j]) for i in range(size) for j in range(size) if i != j]
        loss = _mean(positive) + _mean(negative)
    penalty = _mean([torch.log(logits[i, :].exp().sum()) ** 2 for i in range(size)])
    return loss + settings.logsumexp_penalty * penalty


def reference_actor_loss(energy: Tensor, log_prob: Tensor, log_alpha: Tensor | None) -> Tensor:
    """``E[alpha log pi - f]``, one action at a time; without ``log_alpha``, ``E[-f]``. Inputs ``[B]``."""
    alpha = 0.0 if log_alpha is None else float(log_alpha.exp())
    return _mean([alpha * log_p - f for f, log_p in zip(energy, log_prob, strict=True)])


def reference_temperature_loss(log_prob: Tensor, log_alpha: Tensor, target_entropy: float) -> Tensor:
    """``E[-alpha log pi - alpha target]`` (arXiv 1812.05905, equation 18), one action at a time; ``log_prob`` [B]."""
    return _mean([-log_alpha.exp() * float(log_p) - log_alpha.exp() * target_entropy for log_p in log_prob])


def _mean(values: list[Tensor]) -> Tensor:
    return torch.stack(values).sum() / len(values)
