import math

import pytest
import torch

from gated_serving.rl.contrastive import (
    ContrastiveLoss,
    ContrastiveSettings,
    Energy,
    contrastive_loss,
    contrastive_metrics,
    paired_energy,
    pairwise_energy,
)
from gated_serving.rl.contrastive_reference import reference_contrastive_loss, reference_logits

VARIANTS = [
    ContrastiveSettings(loss=loss, energy=energy, temperature=0.7, logsumexp_penalty=0.3)
    for loss in ContrastiveLoss
    for energy in Energy
    if loss is not ContrastiveLoss.NT_XENT or energy is Energy.COSINE
]
# exp(HAND) is [[3, 1], [2, 6]]: rows sum to 4 and 8, columns to 5 and 7.
HAND = torch.tensor([[3.0, 1.0], [2.0, 6.0]], dtype=torch.float64).log()


def representations(batch: int, size: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    phi, psi = (torch.randn(batch, size, generator=generator, dtype=dtype) for _ in range(2))
    return phi.requires_grad_(), psi.requires_grad_()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("loss", "infonce"), ("energy", "l1"), ("temperature", 0), ("temperature", -0.5),
        ("temperature", float("inf")), ("temperature", True), ("temperature", "0.1"), ("logsumexp_penalty", -0.1),
        ("logsumexp_penalty", float("nan")), ("l2_epsilon", 0.0), ("l2_epsilon", -1e-6),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_name_and_value(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field}={value!r}"):
        ContrastiveSettings(**{field: value})


@pytest.mark.parametrize("energy", [Energy.L2, Energy.DOT])
def test_nt_xent_is_refused_without_normalised_representations(energy: Energy) -> None:
    with pytest.raises(ValueError, match=f"energy='{energy}' with loss='nt_xent'"):
        ContrastiveSettings(loss="nt_xent", energy=energy)


def test_names_are_read_as_enums_and_no_penalty_is_allowed() -> None:
    settings = ContrastiveSettings(loss="binary_nce", energy="dot", logsumexp_penalty=0)
    assert settings.loss is ContrastiveLoss.BINARY_NCE
    assert settings.energy is Energy.DOT


@pytest.mark.parametrize(
    ("energy", "expected"),
    [
        ("l2", [[-5.0, -4.0], [-3.0, -0.001]]),  # the last is the root of the epsilon
        ("dot", [[0.0, 9.0], [16.0, 25.0]]),
        ("cosine", [[0.0, 0.6], [0.8, 1.0]]),
    ],
)
def test_energies_worked_out_by_hand(energy: str, expected: list[list[float]]) -> None:
    phi, psi = torch.tensor([[3.0, 0.0], [3.0, 4.0]]), torch.tensor([[0.0, 4.0], [3.0, 4.0]])
    settings = ContrastiveSettings(energy=energy)
    torch.testing.assert_close(pairwise_energy(phi, psi, settings), torch.tensor(expected), rtol=1e-5, atol=1e-5)
    half = ContrastiveSettings(energy=energy, temperature=0.5)
    torch.testing.assert_close(pairwise_energy(phi, psi, half), 2 * torch.tensor(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("forward_infonce", 0.287682),  # log 4/3 in both rows (3 of 4, 6 of 8)
        ("backward_infonce", 0.332488),  # (log 5/3 + log 7/6) / 2
        ("symmetric_infonce", 0.620170),  # their sum
        ("nt_xent", 0.310085),  # their mean
        ("binary_nce", 1.116796),  # (log 4/3 + log 7/6) / 2 + (log 2 + log 3) / 2
    ],
)
def test_losses_worked_out_by_hand(loss: str, expected: float) -> None:
    settings = ContrastiveSettings(loss=loss, energy="cosine", logsumexp_penalty=0)
    assert contrastive_loss(HAND, settings).item() == pytest.approx(expected, abs=1e-6)
    penalised = ContrastiveSettings(loss=loss, energy="cosine", logsumexp_penalty=0.1)
    # The rows' logsumexps are log 4 and log 8; a tenth of the mean of their squares is 0.312294.
    assert contrastive_loss(HAND, penalised).item() == pytest.approx(expected + 0.312294, abs=1e-6)


def test_metrics_worked_out_by_hand() -> None:
    logits = torch.tensor([[0.0, 1.0, -2.0], [2.0, 6.0, 3.0], [1.0, 2.0, 3.0]])
    metrics = {name: value.item() for name, value in contrastive_metrics(logits).items()}
    sums = [
        math.exp(0) + math.exp(1) + math.exp(-2),
        math.exp(2) + math.exp(6) + math.exp(3),
        math.e + 7.389056 + 20.085537,
    ]
    assert metrics == pytest.approx(
        {
            "categorical_accuracy": 2 / 3,
            "positive_logit": 3.0,
            "negative_logit": 7 / 6,
            "logsumexp": sum(map(math.log, sums)) / 3,
        }
    )


@pytest.mark.parametrize("sizes", [(2, 1), (5, 3), (9, 8)], ids=str)
@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_loss_and_gradient_equal_the_reference(settings: ContrastiveSettings, sizes: tuple[int, int]) -> None:
    results = []
    for energies, function in (
        (pairwise_energy, contrastive_loss),
        (reference_logits, reference_contrastive_loss),
    ):
        phi, psi = representations(*sizes)
        logits = energies(phi, psi, settings)
        loss = function(logits, settings)
        loss.backward()
        results.append((logits.detach(), loss.detach(), phi.grad, psi.grad))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_gradients_equal_finite_differences(settings: ContrastiveSettings) -> None:
    phi, psi = representations(4, 3)
    assert torch.autograd.gradcheck(
        lambda a, b: contrastive_loss(pairwise_energy(a, b, settings), settings), (phi, psi)
    )
    assert torch.autograd.gradcheck(lambda a, b: paired_energy(a, b, settings), (phi, psi))


@pytest.mark.parametrize("energy", Energy)
def test_paired_energies_are_the_diagonal_of_all_pairs(energy: Energy) -> None:
    phi, psi = representations(6, 5)
    settings = ContrastiveSettings(energy=energy, temperature=0.3)
    torch.testing.assert_close(paired_energy(phi, psi, settings), pairwise_energy(phi, psi, settings).diagonal())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, 1.5])
@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_gradients_at_distance_zero_are_finite(settings: ContrastiveSettings, value: float, dtype: torch.dtype) -> None:
    """All representations equal, and all zero: the root, and the angle, have no gradient there."""
    phi, psi = (torch.full((3, 4), value, dtype=dtype, requires_grad=True) for _ in range(2))
    loss = contrastive_loss(pairwise_energy(phi, psi, settings), settings) + paired_energy(phi, psi, settings).sum()
    loss.backward()
    assert loss.isfinite()
    assert phi.grad.isfinite().all()
    assert psi.grad.isfinite().all()


def test_the_epsilon_is_what_an_l2_energy_has_at_distance_zero() -> None:
    phi = torch.ones(2, 3)
    for epsilon in (1e-6, 0.25):
        energy = paired_energy(phi, phi, ContrastiveSettings(l2_epsilon=epsilon))
        torch.testing.assert_close(energy, torch.full((2,), -math.sqrt(epsilon)))


def test_distances_are_right_in_float32_far_from_the_origin() -> None:
    """True pairs 1e-2 apart, 100 away from the origin, where squares are 64 * 10^4 and float32 resolves 0.06."""
    generator = torch.Generator().manual_seed(0)
    psi = 100 + torch.randn(32, 64, generator=generator)
    phi = psi + 1e-2 / 8 * torch.randn(32, 64, generator=generator)
    settings = ContrastiveSettings()
    expected = -(torch.cdist(phi.double(), psi.double()).square() + settings.l2_epsilon).sqrt()
    torch.testing.assert_close(pairwise_energy(phi, psi, settings).double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", ["forward_infonce", "backward_infonce", "symmetric_infonce"])
def test_the_penalty_pulls_the_logsumexp_to_zero_from_either_side(loss: str) -> None:
    """InfoNCE does not see a shift of all logits, so its derivative is the penalty's: the sign of the logsumexp."""
    settings = ContrastiveSettings(loss=loss)
    for offset in (-6.0, 6.0):
        shift = torch.tensor(offset, dtype=torch.float64, requires_grad=True)
        contrastive_loss(HAND + shift, settings).backward()
        assert math.copysign(1, shift.grad.item()) == math.copysign(1, offset)


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_large_logits_do_not_overflow(settings: ContrastiveSettings) -> None:
    logits = torch.tensor([[-2e4, 2e4], [3e4, -3e4]], requires_grad=True)
    loss = contrastive_loss(logits, settings)
    loss.backward()
    assert loss.isfinite()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (4,), (2, 2, 2)], ids=str)
def test_logits_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="logits has shape"):
        contrastive_loss(torch.zeros(shape), ContrastiveSettings())


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_descending_the_loss_pairs_each_state_with_its_goal(settings: ContrastiveSettings) -> None:
    phi, psi = representations(8, 6)
    optimizer = torch.optim.Adam([phi, psi], lr=0.05)
    before = contrastive_metrics(pairwise_energy(phi, psi, settings))["categorical_accuracy"]
    for _ in range(200):
        optimizer.zero_grad()
        contrastive_loss(pairwise_energy(phi, psi, settings), settings).backward()
        optimizer.step()
    assert before < 1
    assert contrastive_metrics(pairwise_energy(phi, psi, settings))["categorical_accuracy"] == 1
