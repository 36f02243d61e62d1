"""The networks of deep contrastive RL: a residual trunk of 4 to 1,024 layers, the actor and the critic built on it.

Source: "1000 Layer Networks for Self-Supervised RL" (arXiv 2503.14858), section 3 and Figure 2, and its released code:
an input layer, then blocks of four (Dense, LayerNorm, swish) whose input is added after the last swish. There is no
norm after the last block, and depth counts the Dense layers inside the blocks only.

Legend: ``B`` batch, ``I`` input size, ``W`` width, ``A`` action size, ``R`` representation size.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, fields
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gated_serving.rl.recomputation import Workspace, run_recomputed

MAX_DEPTH = 1024
RESIDUAL_INTERVAL = 4
"""Layers of a residual block. The released code's ``*_skip_connections`` flags do nothing: it is always four."""
LAYER_NORM_EPS = 1e-6
LOG_STD_MIN = -5.0
LOG_STD_MAX = 2.0


@dataclass(frozen=True, kw_only=True)
class TrunkShape:
    """The sizes of a residual trunk.

    Args:
        input_size: I, at least 1.
        depth: Dense layers inside the residual blocks, a multiple of 4 from 4 to 1,024.
        width: W, at least 1; the paper uses 256.

    Raises:
        ValueError: A size is out of its range; the message names it.
    """

    input_size: int
    depth: int
    width: int = 256

    def __post_init__(self) -> None:
        for field in fields(self):
            _require_size(field.name, getattr(self, field.name))
        if self.depth % RESIDUAL_INTERVAL or self.depth > MAX_DEPTH:
            raise ValueError(f"depth={self.depth!r}: must be a multiple of 4 from 4 to {MAX_DEPTH}")

    @property
    def num_blocks(self) -> int:
        """Residual blocks."""
        return self.depth // RESIDUAL_INTERVAL

    @property
    def num_parameters(self) -> int:
        """Numbers in the trunk: a weight matrix, a bias, and a norm's scale and shift for each layer."""
        input_layer = self.width * (self.input_size + 3)
        return input_layer + self.depth * self.width * (self.width + 3)


class NormalizedLayer(nn.Module):
    """Dense, LayerNorm, swish: ``[B, I] -> [B, W]``."""

    def __init__(self, input_size: int, width: int) -> None:
        super().__init__()
        self.linear = make_linear(input_size, width)
        self.norm = nn.LayerNorm(width, eps=LAYER_NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, W]`` from ``[B, I]``."""
        return F.silu(self.norm(self.linear(x)))


class ResidualBlock(nn.Sequential):
    """Four layers with their input added after the last swish: ``[B, W] -> [B, W]``."""

    def __init__(self, width: int) -> None:
        super().__init__(*(NormalizedLayer(width, width) for _ in range(RESIDUAL_INTERVAL)))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # nn.Sequential's own name for it
        """``[B, W]`` from ``[B, W]``."""
        return input + super().forward(input)


class ResidualTrunk(nn.Module):
    """The input layer and the residual blocks: ``[B, I] -> [B, W]``.

    Args:
        shape: The sizes.
        checkpoint_segments: Into how many runs of blocks the network is cut, each of which is run again in the backward
            pass, so that only its input is kept until then; 0 keeps every activation. See
            ``best_checkpoint_segments``.

    Raises:
        ValueError: ``checkpoint_segments`` is below 0 or above the number of blocks.
    """

    def __init__(self, shape: TrunkShape, *, checkpoint_segments: int = 0) -> None:
        super().__init__()
        if not _is_whole(checkpoint_segments) or not 0 <= checkpoint_segments <= shape.num_blocks:
            raise ValueError(
                f"checkpoint_segments={checkpoint_segments!r}: must be from 0 to {shape.num_blocks}, the number of "
                f"residual blocks at depth {shape.depth}"
            )
        self.shape = shape
        self.checkpoint_segments = checkpoint_segments
        self._workspace = Workspace()
        self.input = NormalizedLayer(shape.input_size, shape.width)
        self.blocks = nn.ModuleList(ResidualBlock(shape.width) for _ in range(shape.num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        """``[B, W]`` from ``[B, I]``."""
        x = self.input(x)
        if self.checkpoint_segments == 0 or not torch.is_grad_enabled():
            for block in self.blocks:
                x = block(x)
            return x
        blocks = [cast("ResidualBlock", block) for block in self.blocks]
        bounds = [len(blocks) * segment // self.checkpoint_segments for segment in range(self.checkpoint_segments + 1)]
        for start, end in itertools.pairwise(bounds):
            x = run_recomputed(x, blocks[start:end], self._workspace)
        return x


class GaussianActor(nn.Module):
    """A policy: a diagonal Gaussian over the action before it is squashed by tanh into [-1, 1].

    Args:
        shape: The trunk's sizes; its input is the observation and the goal, one after the other.
        action_size: A, at least 1.
        checkpoint_segments: See ``ResidualTrunk``.

    Raises:
        ValueError: A size is out of its range.
    """

    def __init__(self, shape: TrunkShape, action_size: int, *, checkpoint_segments: int = 0) -> None:
        super().__init__()
        _require_size("action_size", action_size)
        self.trunk = ResidualTrunk(shape, checkpoint_segments=checkpoint_segments)
        self.mean = make_linear(shape.width, action_size)
        self.log_std = make_linear(shape.width, action_size)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The Gaussian before squashing.

        Args:
            x: ``[B, I]``.

        Returns:
            Mean ``[B, A]``, and the logarithm of the standard deviation ``[B, A]``, squashed into [-5, 2].
        """
        hidden = self.trunk(x)
        log_std = LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (torch.tanh(self.log_std(hidden)) + 1)
        return self.mean(hidden), log_std

    def act(self, x: Tensor) -> Tensor:
        """The deterministic action ``[B, A]`` in [-1, 1] for the input ``[B, I]``: the squashed mean."""
        return torch.tanh(self.mean(self.trunk(x)))

    def sample(self, x: Tensor, *, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """A random action, differentiable with respect to the parameters, and its log-density.

        The density of ``a = tanh(u)`` is that of u over ``1 - tanh(u)^2``, whose logarithm is computed as
        ``2 (log 2 - u - softplus(-2u))``. The released code adds 1e-6 to the difference instead, which bounds the
        density at the edge but is off there; this form is exact for every u.

        Args:
            x: ``[B, I]``.
            generator: Where the noise comes from; None is torch's own.

        Returns:
            Action ``[B, A]`` in [-1, 1] and its log-density ``[B]``.
        """
        mean, log_std = self(x)
        noise = torch.randn(mean.shape, dtype=mean.dtype, device=mean.device, generator=generator)
        unsquashed = mean + log_std.exp() * noise
        log_normal = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        log_slope = 2 * (math.log(2) - unsquashed - F.softplus(-2 * unsquashed))
        return torch.tanh(unsquashed), (log_normal - log_slope).sum(-1)


class ContrastiveCritic(nn.Module):
    """Two trunks that map a state with its action, and a goal, into one representation space.

    Args:
        state_size: Numbers in an observation without its goal.
        action_size: A.
        goal_size: Numbers in a goal.
        depth: Of both trunks; see ``TrunkShape``.
        width: Of both trunks.
        representation_size: R; the paper uses 64.
        checkpoint_segments: See ``ResidualTrunk``.

    Raises:
        ValueError: A size is out of its range.
    """

    def __init__(
        self,
        *,
        state_size: int,
        action_size: int,
        goal_size: int,
        depth: int,
        width: int,
        representation_size: int = 64,
        checkpoint_segments: int = 0,
    ) -> None:
        super().__init__()
        sizes = {
            "state_size": state_size,
            "action_size": action_size,
            "goal_size": goal_size,
            "representation_size": representation_size,
        }
        for name, size in sizes.items():
            _require_size(name, size)
        state_action = TrunkShape(input_size=state_size + action_size, depth=depth, width=width)
        goal = TrunkShape(input_size=goal_size, depth=depth, width=width)
        self.state_action_trunk = ResidualTrunk(state_action, checkpoint_segments=checkpoint_segments)
        self.state_action_head = make_linear(width, representation_size)
        self.goal_trunk = ResidualTrunk(goal, checkpoint_segments=checkpoint_segments)
        self.goal_head = make_linear(width, representation_size)

    def encode_state_action(self, state: Tensor, action: Tensor) -> Tensor:
        """phi(s, a), ``[B, R]``, of states ``[B, state size]`` and actions ``[B, A]``."""
        return self.state_action_head(self.state_action_trunk(torch.cat([state, action], dim=-1)))

    def encode_goal(self, goal: Tensor) -> Tensor:
        """psi(g), ``[B, R]``, of goals ``[B, goal size]``."""
        return self.goal_head(self.goal_trunk(goal))


def best_checkpoint_segments(depth: int) -> int:
    """The number of segments that needs the least memory at this depth.

    While a segment is recomputed it keeps five ``[B, W]`` tensors a block (its input and its layers' products), and
    until then only its input. With S segments of ``depth / 4 / S`` blocks that is ``S + 5 depth / (4 S)`` tensors,
    least at ``sqrt(1.25 depth)``; a segment has at least one block.

    Args:
        depth: Of the trunk; see ``TrunkShape``.

    Returns:
        From 1 to the number of blocks.
    """
    num_blocks = TrunkShape(input_size=1, depth=depth, width=1).num_blocks
    return min(round(math.sqrt(1.25 * depth)), num_blocks)


def compile_blocks(module: nn.Module) -> None:
    """Compiles every residual block in place; parameter names stay as they are.

    The blocks are compiled one by one, because they are all alike: the first one's code serves the rest, whatever the
    depth. Activation checkpointing on a CPU does its own arithmetic and does not use the compiled code.

    On a CPU this does not pay, so no recipe asks for it. At width 256 and depth 32, one thread (CPU time): forward and
    backward take 42 ms eager and 42 ms compiled at batch 256, 170 ms and 171 ms at batch 1,024, for the matrix products
    are most of the work, after 48 to 89 s of compiling. (Inductor's probe for AVX-512 timed out on that machine, so its
    code may have been less than its best.)

    Args:
        module: A trunk, or what holds trunks.
    """
    for block in module.modules():
        if isinstance(block, ResidualBlock):
            block.compile()


def make_linear(input_size: int, output_size: int) -> nn.Linear:
    """A Dense layer as the released code starts it: weights uniform within ``1 / sqrt(fan-in)``, biases zero.

    That is variance scaling by 1/3 over the fan-in, ``sqrt(3 * (1/3) / fan-in)``.
    """
    linear = nn.Linear(input_size, output_size)
    bound = 1 / math.sqrt(input_size)
    nn.init.uniform_(linear.weight, -bound, bound)
    nn.init.zeros_(linear.bias)
    return linear


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require_size(name: str, value: int) -> None:
    if not _is_whole(value) or value < 1:
        raise ValueError(f"{name}={value!r}: must be a whole number of at least 1")
