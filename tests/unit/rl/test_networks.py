import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gated_serving.rl.network_reference import reference_actor, reference_log_prob, reference_trunk
from gated_serving.rl.networks import (
    ContrastiveCritic,
    GaussianActor,
    ResidualTrunk,
    TrunkShape,
    best_checkpoint_segments,
    compile_blocks,
)

SHAPES = [
    TrunkShape(input_size=1, depth=4, width=1),
    TrunkShape(input_size=13, depth=8, width=7),
    TrunkShape(input_size=5, depth=64, width=33),
]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def randomise(module: nn.Module, seed: int = 0) -> None:
    """Gives biases and norms values of their own, so that a network that left one out would show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.rand(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=0.3)


def gradients(module: nn.Module, function: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor | None]]:
    module.zero_grad()
    output = function()
    (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)).sum().backward()
    return output.detach(), {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input_size", 0), ("input_size", 3.0), ("depth", 0), ("depth", -4), ("depth", 6), ("depth", 1028),
        ("depth", 8.0), ("depth", True), ("width", 0), ("width", "256"),
    ],
)  # fmt: skip
def test_a_wrong_size_is_refused_by_name_and_value(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field}={value!r}"):
        TrunkShape(**({"input_size": 13, "depth": 8, "width": 16} | {field: value}))


def test_wrong_sizes_of_actor_and_critic_are_refused_by_name_and_value() -> None:
    with pytest.raises(ValueError, match="action_size=0"):
        GaussianActor(SHAPES[0], 0)
    sizes = {"state_size": 3, "action_size": 2, "goal_size": 1, "depth": 4, "width": 8, "representation_size": 4}
    for name in sizes:
        with pytest.raises(ValueError, match=f"{name}=-4"):
            ContrastiveCritic(**(sizes | {name: -4}))


@pytest.mark.parametrize("segments", [-1, 3, 1.0, True])
def test_a_wrong_number_of_segments_is_refused(segments: object) -> None:
    with pytest.raises(ValueError, match=f"checkpoint_segments={segments!r}: .*2, the number of residual blocks"):
        ResidualTrunk(SHAPES[1], checkpoint_segments=segments)


@pytest.mark.parametrize("shape", [*SHAPES, TrunkShape(input_size=13, depth=1024, width=8)], ids=str)
def test_the_trunk_has_the_parameters_of_the_formula(shape: TrunkShape) -> None:
    trunk = ResidualTrunk(shape)
    assert num_parameters(trunk) == shape.num_parameters
    width, inputs = shape.width, shape.input_size
    expected: dict[str, tuple[int, ...]] = {}
    for layer in ["input", *(f"blocks.{number // 4}.{number % 4}" for number in range(shape.depth))]:
        expected[f"{layer}.linear.weight"] = (width, inputs if layer == "input" else width)
        for name in ("linear.bias", "norm.weight", "norm.bias"):
            expected[f"{layer}.{name}"] = (width,)
    assert {name: tuple(value.shape) for name, value in trunk.state_dict().items()} == expected


def test_sizes_worked_out_by_hand() -> None:
    """FetchReach: 10 numbers observed, a goal of 3, actions of 4, at width 256 and depth 32."""
    trunk = TrunkShape(input_size=13, depth=32, width=256)
    # Input layer 13*256 weights and 3*256 others; 32 layers of 256*256 weights and 3*256 others.
    assert trunk.num_parameters == 3_328 + 768 + 32 * (65_536 + 768) == 2_125_824
    assert num_parameters(GaussianActor(trunk, 4)) == 2_125_824 + 2 * (4 * 256 + 4)
    critic = ContrastiveCritic(state_size=10, action_size=4, goal_size=3, depth=32, width=256)
    state_action = 14 * 256 + 768 + 32 * 66_304
    goal = 3 * 256 + 768 + 32 * 66_304
    assert num_parameters(critic) == state_action + goal + 2 * (64 * 256 + 64)


def test_weights_start_uniform_within_the_fan_in_and_biases_at_zero() -> None:
    torch.manual_seed(0)
    actor = GaussianActor(TrunkShape(input_size=50, depth=8, width=200), 30)
    for name, module in actor.named_modules():
        if isinstance(module, nn.Linear):
            bound = 1 / math.sqrt(module.in_features)
            assert module.bias.count_nonzero() == 0, name
            assert module.weight.abs().max() <= bound, name
            assert module.weight.abs().max() > 0.99 * bound, name
            assert module.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03), name
        elif isinstance(module, nn.LayerNorm):
            assert module.eps == 1e-6
            assert (module.weight == 1).all(), name
            assert (module.bias == 0).all(), name


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_trunk_and_gradient_equal_the_reference(shape: TrunkShape, batch: int) -> None:
    trunk = ResidualTrunk(shape).double()
    randomise(trunk)
    x = torch.randn(batch, shape.input_size, dtype=torch.float64)
    parameters = dict(trunk.named_parameters())
    fast = gradients(trunk, lambda: trunk(x))
    slow = gradients(trunk, lambda: reference_trunk(x, parameters, depth=shape.depth))
    torch.testing.assert_close(fast, slow)


def test_actor_and_gradient_equal_the_reference() -> None:
    actor = GaussianActor(SHAPES[1], 5).double()
    randomise(actor)
    x = torch.randn(6, 13, dtype=torch.float64)
    parameters = dict(actor.named_parameters())
    fast = gradients(actor, lambda: torch.stack(actor(x)))
    slow = gradients(actor, lambda: torch.stack(reference_actor(x, parameters, depth=8)))
    torch.testing.assert_close(fast, slow)
    torch.testing.assert_close(actor.act(x), torch.tanh(slow[0][0]))


def test_the_critic_is_two_trunks_with_a_linear_head_each() -> None:
    critic = ContrastiveCritic(
        state_size=4, action_size=2, goal_size=3, depth=8, width=9, representation_size=5
    ).double()
    randomise(critic)
    state, action, goal = (torch.randn(7, size, dtype=torch.float64) for size in (4, 2, 3))
    parameters = dict(critic.named_parameters())

    def encode(name: str, x: Tensor) -> Tensor:
        prefix = f"{name}_trunk."
        trunk = {key.removeprefix(prefix): value for key, value in parameters.items() if key.startswith(prefix)}
        hidden = reference_trunk(x, trunk, depth=8)
        return hidden @ parameters[f"{name}_head.weight"].T + parameters[f"{name}_head.bias"]

    fast = gradients(critic, lambda: torch.cat([critic.encode_state_action(state, action), critic.encode_goal(goal)]))
    slow = gradients(
        critic, lambda: torch.cat([encode("state_action", torch.cat([state, action], 1)), encode("goal", goal)])
    )
    assert fast[0].shape == (14, 5)
    torch.testing.assert_close(fast, slow)


@pytest.mark.parametrize("segments", [1, 2, 3, 5, 16])
def test_checkpointing_changes_neither_value_nor_gradient(segments: int) -> None:
    shape = SHAPES[2]
    results = []
    for number in (0, segments):
        torch.manual_seed(1)
        trunk = ResidualTrunk(shape, checkpoint_segments=number).double()
        randomise(trunk)
        x = torch.linspace(-2, 2, 3 * 5, dtype=torch.float64).view(3, 5).requires_grad_()
        values = gradients(trunk, lambda trunk=trunk, x=x: trunk(x))
        results.append((values, x.grad))
    torch.testing.assert_close(*results)


def test_actor_and_critic_hand_their_segments_to_every_trunk() -> None:
    actor = GaussianActor(SHAPES[2], 2, checkpoint_segments=3)
    critic = ContrastiveCritic(state_size=4, action_size=2, goal_size=3, depth=64, width=9, checkpoint_segments=5)
    assert actor.trunk.checkpoint_segments == 3
    assert critic.state_action_trunk.checkpoint_segments == critic.goal_trunk.checkpoint_segments == 5


PEAK_MEMORY = """
import sys, torch
from pathlib import Path
from gated_serving.rl.networks import ResidualTrunk, TrunkShape
torch.set_num_threads(1)
trunk = ResidualTrunk(TrunkShape(input_size=4, depth=256, width=64), checkpoint_segments=int(sys.argv[1]))
trunk(torch.ones(4096, 4)).sum().backward()
print(*(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_checkpointing_halves_the_peak_memory_of_a_deep_trunk() -> None:
    peaks_kb = []
    for segments in (0, best_checkpoint_segments(256)):
        command = [sys.executable, "-c", PEAK_MEMORY, str(segments)]
        peaks_kb.append(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    plain, checkpointed = peaks_kb
    assert checkpointed < plain / 2


@pytest.mark.parametrize("depth", [4, 8, 32, 64, 256, 512, 1024])
def test_the_best_number_of_segments_can_be_used(depth: int) -> None:
    segments = best_checkpoint_segments(depth)
    assert 1 <= segments <= depth // 4
    ResidualTrunk(TrunkShape(input_size=2, depth=depth, width=2), checkpoint_segments=segments)


def test_a_thousand_layers_pass_finite_values_and_gradients() -> None:
    torch.manual_seed(0)
    actor = GaussianActor(TrunkShape(input_size=6, depth=1024, width=32), 3, checkpoint_segments=16)
    action, log_prob = actor.sample(torch.randn(4, 6))
    (action.sum() + log_prob.sum()).backward()
    assert log_prob.isfinite().all()
    for name, parameter in actor.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.count_nonzero() > 0, name


def test_log_std_stays_between_its_bounds() -> None:
    actor = GaussianActor(SHAPES[1], 3)
    x = torch.randn(2, 13)
    for bias, expected in ((-1e3, -5.0), (0.0, -1.5), (1e3, 2.0)):
        nn.init.zeros_(actor.log_std.weight)
        nn.init.constant_(actor.log_std.bias, bias)
        torch.testing.assert_close(actor(x)[1], torch.full((2, 3), expected))


def test_a_sample_has_the_density_of_a_squashed_gaussian() -> None:
    actor = GaussianActor(SHAPES[1], 4).double()
    randomise(actor)
    nn.init.constant_(actor.log_std.bias, -1.0)
    x = torch.randn(9, 13, dtype=torch.float64)
    action, log_prob = actor.sample(x, generator=torch.Generator().manual_seed(3))
    mean, log_std = actor(x)
    assert action.abs().max() < 1
    unsquashed = mean + log_std.exp() * torch.randn(
        9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )
    torch.testing.assert_close(action, torch.tanh(unsquashed))
    # Near the edge 1 - tanh^2 loses digits, in the reference and in torch's transform.
    torch.testing.assert_close(log_prob, reference_log_prob(mean, log_std, unsquashed), rtol=1e-5, atol=1e-5)
    squashed = torch.distributions.TransformedDistribution(
        torch.distributions.Normal(mean, log_std.exp()), torch.distributions.TanhTransform()
    )
    torch.testing.assert_close(log_prob, squashed.log_prob(action).sum(-1), rtol=1e-5, atol=1e-5)


def test_the_gradient_of_a_sample_equals_that_of_the_reference() -> None:
    actor = GaussianActor(SHAPES[1], 4).double()
    randomise(actor)
    nn.init.constant_(actor.log_std.bias, -1.0)
    x = torch.randn(5, 13, dtype=torch.float64)

    def fast() -> Tensor:
        action, log_prob = actor.sample(x, generator=torch.Generator().manual_seed(3))
        return torch.cat([action, log_prob[:, None]], 1)

    def slow() -> Tensor:
        mean, log_std = reference_actor(x, dict(actor.named_parameters()), depth=8)
        noise = torch.randn(mean.shape, dtype=mean.dtype, generator=torch.Generator().manual_seed(3))
        unsquashed = mean + torch.exp(log_std) * noise
        return torch.cat([torch.tanh(unsquashed), reference_log_prob(mean, log_std, unsquashed)[:, None]], 1)

    torch.testing.assert_close(gradients(actor, fast), gradients(actor, slow))


def test_a_density_worked_out_by_hand() -> None:
    """Mean 0 and log std -1.5 (both heads zero): the density at u = std * z is that of z, over std and 1 - a^2."""
    actor = GaussianActor(SHAPES[0], 1)
    for head in (actor.mean, actor.log_std):
        nn.init.zeros_(head.weight)
    action, log_prob = actor.sample(torch.zeros(1, 1), generator=torch.Generator().manual_seed(0))
    z = torch.randn(1, 1, generator=torch.Generator().manual_seed(0)).item()
    a = math.tanh(math.exp(-1.5) * z)
    assert action.item() == pytest.approx(a, rel=1e-5)
    assert log_prob.item() == pytest.approx(-z * z / 2 - 0.918939 + 1.5 - math.log(1 - a * a), rel=1e-5)


def test_samples_at_the_edge_keep_a_finite_density_and_gradient() -> None:
    actor = GaussianActor(SHAPES[1], 2)
    nn.init.constant_(actor.mean.bias, 40.0)
    action, log_prob = actor.sample(torch.randn(3, 13))
    log_prob.sum().backward()
    assert (action == 1).all()
    assert log_prob.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in actor.parameters())


def test_samples_follow_their_generator() -> None:
    actor, x = GaussianActor(SHAPES[1], 2), torch.randn(3, 13)
    first, again = (actor.sample(x, generator=torch.Generator().manual_seed(5))[0] for _ in range(2))
    other = actor.sample(x, generator=torch.Generator().manual_seed(6))[0]
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_compiled_blocks_share_their_code_and_equal_the_reference() -> None:
    actor = GaussianActor(TrunkShape(input_size=3, depth=12, width=17), 2)
    randomise(actor)
    names = list(actor.state_dict())
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile_blocks(actor)
    assert list(actor.state_dict()) == names
    x, parameters = torch.randn(6, 3), dict(actor.named_parameters())
    del_me = [torch.full((6, 17), float("nan")) for _ in range(8)]
    del del_me
    fast = gradients(actor, lambda: torch.stack(actor(x)))
    slow = gradients(actor, lambda: torch.stack(reference_actor(x, parameters, depth=12)))
    torch.testing.assert_close(fast, slow, rtol=1e-3, atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_recomputation_reads_no_memory_of_its_own() -> None:
    """A batch of another size between two equal ones, and memory that may be given again filled with NaN."""
    torch.manual_seed(0)
    trunk = ResidualTrunk(SHAPES[2], checkpoint_segments=4)
    x = torch.randn(6, 5)
    first = gradients(trunk, lambda: trunk(x))
    gradients(trunk, lambda: trunk(x[:2]))
    del_me = [torch.full((6, 33), float("nan")) for _ in range(64)]
    del del_me
    torch.testing.assert_close(gradients(trunk, lambda: trunk(x)), first)


def test_recomputation_gives_no_gradient_to_frozen_parameters() -> None:
    trunk = ResidualTrunk(SHAPES[2], checkpoint_segments=4).requires_grad_(False)
    x = torch.randn(6, 5, requires_grad=True)
    trunk(x).sum().backward()
    plain = ResidualTrunk(SHAPES[2])
    plain.load_state_dict(trunk.state_dict())
    y = x.detach().clone().requires_grad_()
    plain(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    assert all(parameter.grad is None for parameter in trunk.parameters())
