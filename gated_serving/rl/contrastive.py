"""The contrastive critic's energies and losses.

Sources: "1000 Layer Networks for Self-Supervised RL" (arXiv 2503.14858), section 3, for the energy -L2, forward InfoNCE
and the logsumexp penalty; "Contrastive Learning as Goal-Conditioned Reinforcement Learning" (arXiv 2206.07568),
equation 5, for binary NCE; "Accelerating Goal-Conditioned RL Algorithms and Research" (arXiv 2408.11052), section 5,
for the directions of InfoNCE; "A Simple Framework for Contrastive Learning" (arXiv 2002.05709), equation 1, for
NT-Xent.

Row i of the logits is the i-th state and action, column j the j-th goal; pairs on the diagonal belong together.

Legend: ``B`` batch, ``R`` representation size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.nn.functional as F
from torch import Tensor


class Energy(StrEnum):
    """How well a state and action and a goal fit, from their representations."""

    L2 = "l2"
    """``-sqrt(|phi - psi|^2 + epsilon)``, the paper's."""
    DOT = "dot"
    """``phi . psi``."""
    COSINE = "cosine"
    """``phi . psi / (|phi| |psi|)``."""


class ContrastiveLoss(StrEnum):
    """Which pairs a true pair is told from."""

    FORWARD_INFONCE = "forward_infonce"
    """Among all goals, which one belongs to this state and action: softmax over rows."""
    BACKWARD_INFONCE = "backward_infonce"
    """Among all states and actions, which one belongs to this goal: softmax over columns."""
    SYMMETRIC_INFONCE = "symmetric_infonce"
    """The sum of both."""
    NT_XENT = "nt_xent"
    """The mean over the 2B anchors of both sides, on cosines over a temperature."""
    BINARY_NCE = "binary_nce"
    """Each pair by itself: does it belong together."""


@dataclass(frozen=True, kw_only=True)
class ContrastiveSettings:
    """What the critic minimises.

    Args:
        loss: The loss; a string is turned into its enum.
        energy: The energy; NT-Xent needs ``cosine``.
        temperature: Energies are divided by it, for the critic and the actor alike; above 0.
        logsumexp_penalty: Weight of the mean squared logsumexp of the rows; at least 0.
        l2_epsilon: Added to the squared distance under the root, in squared units of the representation; above 0,
            because the root has no gradient at zero.

    Raises:
        ValueError: A field is out of its range, or the loss does not go with the energy; the message names it.
    """

    loss: ContrastiveLoss = ContrastiveLoss.FORWARD_INFONCE
    energy: Energy = Energy.L2
    temperature: float = 1.0
    logsumexp_penalty: float = 0.1
    l2_epsilon: float = 1e-6

    def __post_init__(self) -> None:
        for name, kind in (("loss", ContrastiveLoss), ("energy", Energy)):
            object.__setattr__(self, name, _parse(kind, name, getattr(self, name)))
        for name, allows_zero in (("temperature", False), ("logsumexp_penalty", True), ("l2_epsilon", False)):
            _require_number(name, getattr(self, name), allows_zero=allows_zero)
        if self.loss is ContrastiveLoss.NT_XENT and self.energy is not Energy.COSINE:
            raise ValueError(
                f"energy='{self.energy}' with loss='nt_xent': NT-Xent is defined on normalised representations; "
                "use energy='cosine', or loss='symmetric_infonce'"
            )


def pairwise_energy(phi: Tensor, psi: Tensor, settings: ContrastiveSettings) -> Tensor:
    """The energy of every state and action with every goal, over the temperature.

    Args:
        phi: Representations of states and actions, ``[B, R]``.
        psi: Representations of goals, ``[B, R]``.
        settings: Energy, temperature and epsilon.

    Returns:
        ``[B, B]``, rows from ``phi``, columns from ``psi``.
    """
    if settings.energy is Energy.L2:
        energy = -torch.sqrt(_squared_distances(phi, psi) + settings.l2_epsilon)
    elif settings.energy is Energy.DOT:
        energy = phi @ psi.T
    else:
        energy = F.normalize(phi, dim=-1) @ F.normalize(psi, dim=-1).T
    return energy / settings.temperature


def paired_energy(phi: Tensor, psi: Tensor, settings: ContrastiveSettings) -> Tensor:
    """The energy of each state and action with its own goal: the diagonal of ``pairwise_energy``.

    Args:
        phi: ``[B, R]``.
        psi: ``[B, R]``.
        settings: Energy, temperature and epsilon.

    Returns:
        ``[B]``.
    """
    if settings.energy is Energy.L2:
        energy = -torch.sqrt((phi - psi).square().sum(-1) + settings.l2_epsilon)
    elif settings.energy is Energy.DOT:
        energy = (phi * psi).sum(-1)
    else:
        energy = (F.normalize(phi, dim=-1) * F.normalize(psi, dim=-1)).sum(-1)
    return energy / settings.temperature


def contrastive_loss(logits: Tensor, settings: ContrastiveSettings) -> Tensor:
    """The critic's loss, to be minimised.

    Two losses deviate from their source. NT-Xent there also tells an anchor from the other anchors of its own side;
    here the sides are different things, a state with an action and a goal, so only the other side's are its negatives.
    Binary NCE weighs true and false pairs alike, as its equation does; the released code of that paper takes the mean
    over all B x B pairs, which lowers every logit by log(B - 1) at the optimum.

    The penalty is added: it holds the logsumexp of every row near zero, which the InfoNCE losses leave free. The paper
    prints its objective to be maximised with a plus before the penalty; the released code subtracts it there, as is
    meant. The code's 1e-6 inside the penalty's logsumexp is left out.

    Args:
        logits: ``[B, B]`` from ``pairwise_energy``, B at least 2.
        settings: Loss and penalty.

    Returns:
        A scalar.

    Raises:
        ValueError: The logits are not square, or there is nothing to tell a pair from.
    """
    if logits.ndim != 2 or logits.shape[0] != logits.shape[1] or len(logits) < 2:
        raise ValueError(
            f"logits has shape {tuple(logits.shape)}: must be [B, B] with a batch of at least 2, one row a state and "
            "action and one column a goal"
        )
    positives = logits.diagonal()
    row_logsumexp = logits.logsumexp(1)
    if settings.loss is ContrastiveLoss.BINARY_NCE:
        loss = _binary_nce(logits, positives)
    else:
        forward = (row_logsumexp - positives).mean()
        if settings.loss is ContrastiveLoss.FORWARD_INFONCE:
            loss = forward
        else:
            backward = (logits.logsumexp(0) - positives).mean()
            if settings.loss is ContrastiveLoss.BACKWARD_INFONCE:
                loss = backward
            elif settings.loss is ContrastiveLoss.SYMMETRIC_INFONCE:
                loss = forward + backward
            else:
                loss = (forward + backward) / 2
    return loss + settings.logsumexp_penalty * row_logsumexp.square().mean()


@torch.no_grad()
def contrastive_metrics(logits: Tensor) -> dict[str, Tensor]:
    """What to watch while the critic learns.

    Args:
        logits: ``[B, B]``, B at least 2.

    Returns:
        Scalars: ``categorical_accuracy`` (share of rows whose largest logit is their own goal's),
        ``positive_logit`` and ``negative_logit`` (means on and off the diagonal), ``logsumexp`` (mean over rows).
    """
    size = len(logits)
    positives = logits.diagonal()
    own = torch.arange(size, device=logits.device)
    return {
        "categorical_accuracy": (logits.argmax(1) == own).float().mean(),
        "positive_logit": positives.mean(),
        "negative_logit": (logits.sum() - positives.sum()) / (size * (size - 1)),
        "logsumexp": logits.logsumexp(1).mean(),
    }


def _squared_distances(phi: Tensor, psi: Tensor) -> Tensor:
    """``|phi_i - psi_j|^2``, ``[B, B]``, by one matrix product; on the diagonal exactly, from the differences.

    ``|phi|^2 + |psi|^2 - 2 phi.psi`` takes a quarter of the time that differences take (B 2048, R 64, one thread,
    forward and backward: 0.09 s against 0.34 s), but in float32 it loses distances that are short beside the vectors.
    So the vectors are centred first, and the true pairs, the only ones that training draws together, are recomputed.
    """
    center = psi.detach().mean(0)  # distances do not change when both sides move, and neither do their gradients
    phi, psi = phi - center, psi - center
    products = phi.square().sum(1, keepdim=True) + psi.square().sum(1) - 2 * phi @ psi.T
    return products.clamp_min(0).diagonal_scatter((phi - psi).square().sum(1))


def _binary_nce(logits: Tensor, positives: Tensor) -> Tensor:
    """``-E+[log sigmoid(f)] - E-[log(1 - sigmoid(f))]``, each a mean over its own pairs."""
    size = len(logits)
    negatives = F.softplus(logits).sum() - F.softplus(positives).sum()
    return F.softplus(-positives).mean() + negatives / (size * (size - 1))


def _parse(kind: type[StrEnum], name: str, value: object) -> StrEnum:
    try:
        return kind(value)  # pyright: ignore[reportArgumentType]  # StrEnum refuses whatever is not one of its values
    except ValueError:
        choices = ", ".join(repr(str(member)) for member in kind)
        raise ValueError(f"{name}={value!r}: must be one of {choices}") from None


def _require_number(name: str, value: float, *, allows_zero: bool) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)  # values come from JSON too
    if not (is_number and (0 < value < math.inf or (allows_zero and value == 0))):
        least = "of at least 0" if allows_zero else "above 0"
        raise ValueError(f"{name}={value!r}: must be a finite number {least}")
