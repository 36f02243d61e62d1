"""One version of a policy, ready to act: what it takes, its engine, its batcher.

Legend: n rows of a request.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policy_server.batch_run import OnDone, RowsDone
from policy_server.batcher import Batcher, BatchRecord
from policy_server.engines.base import Array, Engine
from policy_server.errors import InvalidRequestError
from policy_server.manifest import Manifest
from policy_server.observation import ObservationParser
from policy_server.settings import BatchingSettings

NOISE = "noise"
ACTION = "action"
LOGITS = "logits"
MAX_SEED = (1 << 64) - 1


@dataclass(slots=True)
class ActRequest:
    """A request that has passed its checks.

    Attributes:
        observation: Every field of the manifest, [n, *shape], contiguous, of the manifest's type, finite.
        rows: n, at least 1.
        batched: Whether the client sent a batch, and gets one back.
        deterministic: The best action, or one drawn from the distribution.
        seed: What to draw with; the same seed and observation give the same action. None for a fresh one.
        deadline: When it is too late to begin, by ``time.monotonic()``; None for the policy's own.
        session_id: Whose request it is; chooses between a version and its canary.
    """

    observation: dict[str, Array]
    rows: int
    batched: bool = False
    deterministic: bool = True
    seed: int | None = None
    deadline: float | None = None
    session_id: str | None = None


@dataclass(slots=True)
class ServedPolicy:
    """A version that is loaded, checked and warm. Made on the event loop that serves it.

    Attributes:
        manifest: What it says of itself.
        batching: How its requests are gathered.
        max_rows: Rows of one request.
        engine_name: What runs it, such as ``onnxruntime``.
        batch_s: How long a full batch took when it was warmed.
        loaded_at: When it went live, seconds since the epoch.
    """

    manifest: Manifest
    engine: Engine
    batching: BatchingSettings
    engine_name: str
    observe: Callable[[BatchRecord], None]
    max_rows: int = 1024
    run_inline_below_s: float = 0.0
    batch_s: float = math.inf
    loaded_at: float = field(default_factory=time.time)
    batcher: Batcher = field(init=False)
    observations: ObservationParser = field(init=False)
    _zero_noise: dict[int, Array] = field(init=False, default_factory=dict[int, Array])

    def __post_init__(self) -> None:
        inline = self.batch_s < self.run_inline_below_s
        self.batcher = Batcher(
            self.engine,
            self.batching,
            observe=self.observe,
            run_inline=inline,
            required=(ACTION, LOGITS) if _is_categorical(self.manifest) else (ACTION,),
            bound=action_bound(self.manifest),
        )
        self.observations = ObservationParser(self.manifest, max_rows=self.max_rows)

    @property
    def name(self) -> str:
        """The policy's name."""
        return self.manifest.name

    @property
    def version(self) -> int:
        """Its version."""
        return self.manifest.version

    def act(self, request: ActRequest, on_done: OnDone) -> None:
        """Queues a request; ``on_done`` is called once, later, on the event loop.

        The outputs it gets are the graph's: ``action`` [n, *shape] within the manifest's bounds, and for policies with
        a distribution its parameters.

        Raises:
            PolicyServerError: It cannot be queued, or asks for what the policy does not have.
        """
        self.batcher.submit(self.prepare(request), request.rows, deadline=request.deadline, on_done=on_done)

    async def infer(self, request: ActRequest) -> RowsDone:
        """``act`` for callers who can wait.

        Raises:
            PolicyServerError: As ``act``, or what became of the request.
        """
        return await self.batcher.infer(self.prepare(request), request.rows, deadline=request.deadline)

    def prepare(self, request: ActRequest) -> Mapping[str, Array]:
        """The graph's inputs for a request: the observation, and the noise where the graph takes it.

        Raises:
            InvalidRequestError: A sampled action of a policy without a distribution, or a seed for a deterministic one.
        """
        distribution = self.manifest.distribution
        if request.deterministic and request.seed is not None:
            raise InvalidRequestError(
                f"seed={request.seed}: a deterministic action draws nothing; leave it out, or say deterministic=false",
                field="seed",
            )
        if distribution is None:
            if not request.deterministic:
                raise InvalidRequestError(
                    f"deterministic=false: {self.name} {self.version} was exported without its distribution; export it "
                    "with --outputs distribution to draw actions",
                    field="deterministic",
                )
            return request.observation
        shape = (request.rows, distribution.noise_size)
        if request.deterministic:
            zeros = self._zero_noise.get(request.rows)
            if zeros is None:
                zeros = np.zeros(shape, np.float32)
                if request.rows <= self.batching.max_batch:
                    self._zero_noise[request.rows] = zeros
            return {**request.observation, NOISE: zeros}
        return {**request.observation, NOISE: draw_noise(distribution.noise, shape, request.seed)}

    async def close(self) -> None:
        """Lets what runs finish and gives the memory back."""
        await self.batcher.close()


def draw_noise(kind: str, shape: tuple[int, int], seed: int | None) -> Array:
    """Noise for a batch; row i of a seed is the same whatever else is in the batch.

    Args:
        kind: ``standard_normal`` or ``standard_gumbel``.
        shape: Rows and values of a row.
        seed: 0 to 2^64 - 1; None for a fresh one.
    """
    generator = np.random.Generator(np.random.Philox(seed))
    noise: Any = generator.gumbel(size=shape) if kind == "standard_gumbel" else generator.standard_normal(size=shape)
    return noise.astype(np.float32)


def action_bounds(manifest: Manifest) -> tuple[NDArray[np.float32] | None, NDArray[np.float32] | None]:
    """Lower and upper bounds of a continuous action, each of the action's shape; None where there are none."""
    space = manifest.action
    if space.kind == "discrete":
        return None, None

    def side(bounds: tuple[float | None, ...] | None, open_end: float) -> NDArray[np.float32] | None:
        if bounds is None or all(bound is None for bound in bounds):
            return None
        values = [open_end if bound is None else bound for bound in bounds]
        return np.asarray(values, np.float32).reshape(space.shape)

    return side(space.low, -math.inf), side(space.high, math.inf)


def action_bound(manifest: Manifest) -> Callable[[Array], Array]:
    """What brings actions [B, *shape] within the manifest's bounds; it raises ValueError where they cannot be.

    The graph does so too; what a robot gets shall not depend on it. A choice that does not exist has no nearest one,
    so it is an error.
    """
    shape, (low, high) = tuple(manifest.action.shape), action_bounds(manifest)
    choices = manifest.action.num_choices
    limits = None if choices is None else np.asarray(choices, np.int64).reshape(shape)

    def bound(actions: Array) -> Array:
        if actions.shape[1:] != shape:
            raise ValueError(f"its shape is {list(actions.shape[1:])}, not {list(shape)}")
        if limits is not None and not ((actions >= 0) & (actions < limits)).all():
            raise ValueError(f"a choice from {int(actions.min())} to {int(actions.max())}, there are {choices}")
        return actions if low is None and high is None else np.clip(actions, low, high)

    return bound


def _is_categorical(manifest: Manifest) -> bool:
    # The largest of logits that are NaN is a choice like any other; only the logits tell.
    return manifest.distribution is not None and manifest.distribution.kind == "categorical"
