"""The whole configuration of a policy's training, as frozen dataclasses; a recipe is a function that returns one.

Every section checks its own values when it is made. ``TrainingRun`` checks what two sections must agree on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gated_serving.rl.contrastive import ContrastiveSettings
from gated_serving.rl.networks import RESIDUAL_INTERVAL, TrunkShape
from gated_serving.run_settings import require, require_above_0, require_at_least

MAX_SEED = 2**32 - 1
MAX_THREADS = 1024


@dataclass(frozen=True, kw_only=True)
class EnvironmentSettings:
    """Where the policy acts.

    Args:
        id: A Gymnasium id, ``metaworld:TASK``, or ``package.module:name`` of a goal environment of your own.
        kwargs: Arguments of the environment; ``max_episode_steps`` is understood for all.
    """

    id: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(bool(self.id), "id", self.id, "a Gymnasium id, metaworld:TASK or package.module:name")
        require("render_mode" not in self.kwargs, "kwargs", self.kwargs,
                "without render_mode; evaluation.video=true records an episode")  # fmt: skip
        require("environment_id" not in self.kwargs, "kwargs", self.kwargs, "without environment_id, which is id's")


@dataclass(frozen=True, kw_only=True)
class NetworkSettings:
    """Sizes of the actor and of the critic's two encoders.

    Args:
        actor_depth: Dense layers in the actor's residual blocks, a multiple of 4 up to 1,024.
        critic_depth: The same of each encoder.
        width: Channels of every layer.
        representation_size: Numbers of a representation, in which states with actions meet goals.
        normalize_inputs: Whether observations and goals are shifted and scaled by their mean and standard deviation
            over the random steps. The paper's networks take them as they are.
    """

    actor_depth: int = 32
    critic_depth: int = 32
    width: int = 256
    representation_size: int = 64
    normalize_inputs: bool = False

    def __post_init__(self) -> None:
        require_at_least(self, 1, "width", "representation_size")
        for name in ("actor_depth", "critic_depth"):
            try:
                TrunkShape(input_size=1, depth=getattr(self, name), width=self.width)
            except ValueError as error:
                raise ValueError(str(error).replace("depth", name, 1)) from None


@dataclass(frozen=True, kw_only=True)
class ActorSettings:
    """What the actor is trained towards, besides the critic's energy.

    Args:
        temperature: ``learned`` keeps the policy's entropy at its target; ``none`` leaves the entropy term out.
        initial_alpha: Temperature at the start.
        target_entropy_per_action: Target of the entropy in nats, for each dimension of the action.
        random_goal_share: Share of the actor's batch whose goals are those of other states, so not reached from there.
    """

    temperature: Literal["learned", "none"] = "learned"
    initial_alpha: float = 1.0
    target_entropy_per_action: float = -0.5
    random_goal_share: float = 0.0

    def __post_init__(self) -> None:
        require_above_0(self, "initial_alpha")
        require(math.isfinite(self.target_entropy_per_action), "target_entropy_per_action",
                self.target_entropy_per_action, "a finite number")  # fmt: skip
        require(0 <= self.random_goal_share <= 1, "random_goal_share", self.random_goal_share, "from 0 to 1")


@dataclass(frozen=True, kw_only=True)
class CollectionSettings:
    """How experience is gathered. A round is ``round_length`` steps of every environment, followed by updates.

    Args:
        num_environments: Environments that step together.
        round_length: Steps of each environment in a round. A multiple of the episode's length loses nothing when a
            checkpoint is written, because episodes under way are ended there.
        num_random_steps: Steps of all environments together with random actions, before the first update; rounded up to
            whole steps of all environments.
    """

    num_environments: int = 8
    round_length: int = 50
    num_random_steps: int = 4_000

    def __post_init__(self) -> None:
        require_at_least(self, 1, "num_environments", "round_length", "num_random_steps")

    @property
    def num_steps_of_round(self) -> int:
        """Steps of all environments together in a round."""
        return self.num_environments * self.round_length


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """What is kept, and how goals are drawn from it.

    Args:
        capacity: Steps of all environments together; the oldest are forgotten.
        gamma: A goal lies j steps ahead with probability proportional to ``gamma ** j``.
    """

    capacity: int = 1_000_000
    gamma: float = 0.99

    def __post_init__(self) -> None:
        require_at_least(self, 1, "capacity")
        require(0 < self.gamma <= 1, "gamma", self.gamma, "above 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class StageSettings:
    """A stretch of the training. Its updates are spread evenly over its environment steps.

    Args:
        num_environment_steps: Steps of all environments together; rounded up to whole rounds. 0 leaves the stage out.
        num_updates: Updates of actor and critic.
        batch_size: Steps drawn for an update; each is told from all the others.
        learning_rate: Adam's, for actor, critic and temperature.
        warmup_share: Share of the stage's updates over which the learning rate rises from 0.
    """

    num_environment_steps: int
    num_updates: int
    batch_size: int
    learning_rate: float
    warmup_share: float

    def __post_init__(self) -> None:
        require_at_least(self, 0, "num_environment_steps", "num_updates")
        require_at_least(self, 2, "batch_size")
        require_above_0(self, "learning_rate")
        require(0 <= self.warmup_share <= 1, "warmup_share", self.warmup_share, "from 0 to 1")
        require((self.num_updates > 0) == (self.num_environment_steps > 0), "num_updates", self.num_updates,
                "above 0 where num_environment_steps is, and 0 where that is 0")  # fmt: skip


def pretrain_stage(*, num_environment_steps: int, num_updates: int) -> StageSettings:
    """Large batches and a long warm-up, for networks that know nothing yet."""
    return StageSettings(
        num_environment_steps=num_environment_steps, num_updates=num_updates,
        batch_size=2048, learning_rate=3e-4, warmup_share=0.10,
    )  # fmt: skip


def explore_stage(*, num_environment_steps: int, num_updates: int) -> StageSettings:
    """Smaller batches and steps, while the policy reaches further."""
    return StageSettings(
        num_environment_steps=num_environment_steps, num_updates=num_updates,
        batch_size=1024, learning_rate=1e-4, warmup_share=0.05,
    )  # fmt: skip


def finetune_stage(*, num_environment_steps: int, num_updates: int) -> StageSettings:
    """The smallest batches and steps, for the last hand."""
    return StageSettings(
        num_environment_steps=num_environment_steps, num_updates=num_updates,
        batch_size=512, learning_rate=5e-5, warmup_share=0.0,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class OptimisationSettings:
    """Adam, and chance.

    Args:
        adam_beta1: Adam's first decay rate.
        adam_beta2: Adam's second decay rate.
        max_grad_norm: The actor's and the critic's gradients are clipped to this norm; 0 does not clip.
        seed: Of weights, exploration, batches and the training's episodes.
    """

    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    max_grad_norm: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("adam_beta1", "adam_beta2"):
            require(0 <= getattr(self, name) < 1, name, getattr(self, name), "from 0 to below 1")
        require(0 <= self.max_grad_norm < math.inf, "max_grad_norm", self.max_grad_norm, "a finite number, at least 0")
        require(0 <= self.seed <= MAX_SEED, "seed", self.seed, "from 0 to 2**32 - 1")


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """How success is measured: deterministic actions, on episodes that training never sees.

    Two sets of episodes are kept apart from training and from each other. On the first the best checkpoint is chosen.
    The second is met only before the first update and at the end, because the best of many measurements flatters.

    Args:
        eval_rounds: Rounds between two evaluations.
        num_episodes: Episodes of such an evaluation.
        num_final_episodes: Episodes of the other set.
        success: Whether the goal must be reached at the ``end`` of the episode, or at ``any`` of its steps.
        video: Whether an episode of the best policy is recorded at the end.
    """

    eval_rounds: int = 10
    num_episodes: int = 50
    num_final_episodes: int = 100
    success: Literal["end", "any"] = "end"
    video: bool = False

    def __post_init__(self) -> None:
        require_at_least(self, 1, "eval_rounds", "num_episodes", "num_final_episodes")


@dataclass(frozen=True, kw_only=True)
class RuntimeSettings:
    """Where and how the run computes, is watched and saved. A resumed run may have others but for ``save_rounds``.

    Args:
        device: ``auto`` takes a GPU where there is one.
        num_threads: Threads of this process on the CPU; None leaves it to torch.
        num_processes: Processes that step the environments, each as many; 0 steps them in this one.
        checkpoint_segments: Segments of the trunks whose activations are computed again in the backward pass, which
            takes less memory and more time; 0 keeps all activations. ``best_checkpoint_segments`` of
            gated_serving.rl.networks says how many save most.
        compile: Whether the residual blocks run through torch.compile; for a GPU, a CPU gains nothing by it.
        log_rounds: Rounds between two lines of the logs.
        save_rounds: Rounds between two checkpoints; a multiple of ``log_rounds``, so that a resumed run logs the same
            averages as an unbroken one.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    num_threads: int | None = None
    num_processes: int = 0
    checkpoint_segments: int = 0
    compile: bool = False
    log_rounds: int = 1
    save_rounds: int = 10

    def __post_init__(self) -> None:
        require_at_least(self, 1, "num_threads", "log_rounds", "save_rounds")
        require(self.num_threads is None or self.num_threads <= MAX_THREADS, "num_threads", self.num_threads,
                f"at most {MAX_THREADS}")  # fmt: skip
        require_at_least(self, 0, "num_processes", "checkpoint_segments")
        require(self.save_rounds % self.log_rounds == 0, "save_rounds", self.save_rounds,
                f"a multiple of log_rounds, which is {self.log_rounds}")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A whole run: what a recipe returns.

    Raises:
        ValueError: Two sections do not agree.
    """

    name: str
    environment: EnvironmentSettings
    networks: NetworkSettings = field(default_factory=NetworkSettings)
    contrastive: ContrastiveSettings = field(default_factory=ContrastiveSettings)
    actor: ActorSettings = field(default_factory=ActorSettings)
    collection: CollectionSettings = field(default_factory=CollectionSettings)
    replay: ReplaySettings = field(default_factory=ReplaySettings)
    pretrain: StageSettings
    explore: StageSettings
    finetune: StageSettings
    optimisation: OptimisationSettings = field(default_factory=OptimisationSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    runtime: RuntimeSettings = field(default_factory=RuntimeSettings)

    def __post_init__(self) -> None:
        environments = self.collection.num_environments
        processes = self.runtime.num_processes
        require(processes == 0 or environments % processes == 0, "runtime.num_processes", processes,
                f"0, or divide collection.num_environments, which is {environments}")  # fmt: skip
        blocks = min(self.networks.actor_depth, self.networks.critic_depth) // RESIDUAL_INTERVAL
        segments = self.runtime.checkpoint_segments
        require(segments <= blocks, "runtime.checkpoint_segments", segments,
                f"at most {blocks}, the residual blocks of the shallower network")  # fmt: skip
        require(self.replay.capacity >= environments, "replay.capacity", self.replay.capacity,
                f"at least collection.num_environments, which is {environments}")  # fmt: skip
        require(any(stage.num_updates for stage in self.stages.values()), "pretrain.num_updates", 0,
                "above 0, or another stage's: no stage has updates")  # fmt: skip

    @property
    def stages(self) -> dict[str, StageSettings]:
        """The stages by name, in their order."""
        return {"pretrain": self.pretrain, "explore": self.explore, "finetune": self.finetune}
