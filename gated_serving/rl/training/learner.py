"""Actor, critic and temperature with their optimisers, and one update of all three.

Source: "1000 Layer Networks for Self-Supervised RL" (arXiv 2503.14858) and its released code: Adam for each, no target
networks, one critic; the actor climbs the critic of before the update, on the goals that the critic was trained with.

Legend: ``B`` batch, ``O`` observation size, ``G`` goal size, ``A`` action size, ``I`` = O + G.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gated_serving.rl.actor_objective import actor_loss, temperature_loss
from gated_serving.rl.contrastive import contrastive_loss, contrastive_metrics, paired_energy, pairwise_energy
from gated_serving.rl.environments import GoalEnvironmentSpec
from gated_serving.rl.networks import ContrastiveCritic, GaussianActor, TrunkShape, compile_blocks
from gated_serving.rl.normalization import InputNormalizer
from gated_serving.rl.replay import ReplayBatch
from gated_serving.rl.settings import TrainingRun


class Learner:
    """What learns.

    Args:
        run: The settings.
        spec: What the networks have to fit.
        device: Where they lie.
    """

    def __init__(self, run: TrainingRun, spec: GoalEnvironmentSpec, device: torch.device) -> None:
        self.run = run
        self.device = device
        sizes, segments = run.networks, run.runtime.checkpoint_segments
        shape = TrunkShape(
            input_size=spec.observation_size + spec.goal_size, depth=sizes.actor_depth, width=sizes.width
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(run.optimisation.seed)
            self.actor = GaussianActor(shape, spec.action_size, checkpoint_segments=segments).to(device)
            self.critic = ContrastiveCritic(
                state_size=spec.observation_size, action_size=spec.action_size, goal_size=spec.goal_size,
                depth=sizes.critic_depth, width=sizes.width, representation_size=sizes.representation_size,
                checkpoint_segments=segments,
            ).to(device)  # fmt: skip
        self.normalizer = InputNormalizer(spec.observation_size, spec.goal_size).to(device)
        self.log_alpha = None
        if run.actor.temperature == "learned":
            self.log_alpha = nn.Parameter(torch.tensor(math.log(run.actor.initial_alpha), device=device))
        self._target_entropy = run.actor.target_entropy_per_action * spec.action_size
        self.generator = torch.Generator(device).manual_seed(run.optimisation.seed)
        self.optimizers = {"actor": self._adam(self.actor.parameters()), "critic": self._adam(self.critic.parameters())}
        if self.log_alpha is not None:
            self.optimizers["temperature"] = self._adam([self.log_alpha])
        if run.runtime.compile:
            compile_blocks(self.actor)
            compile_blocks(self.critic)

    @property
    def num_parameters(self) -> dict[str, int]:
        """Numbers in each network."""
        return {
            "actor": sum(parameter.numel() for parameter in self.actor.parameters()),
            "critic": sum(parameter.numel() for parameter in self.critic.parameters()),
        }

    @torch.no_grad()
    def act(self, observation: Tensor, goal: Tensor, *, explore: bool) -> Tensor:
        """Actions ``[B, A]`` in [-1, 1] for observations ``[B, O]`` and goals ``[B, G]``, on the CPU.

        Args:
            observation: As the environment gives it.
            goal: The desired goal, as the environment gives it.
            explore: Whether actions are sampled, or the most likely ones.
        """
        x = self.normalizer(torch.cat([observation, goal], dim=-1).to(self.device))
        action = self.actor.sample(x, generator=self.generator)[0] if explore else self.actor.act(x)
        return action.cpu()

    def update(self, batch: ReplayBatch, learning_rate: float) -> dict[str, Tensor]:
        """One step of the critic, of the actor and of the temperature.

        Args:
            batch: Drawn from the replay.
            learning_rate: Of all three.

        Returns:
            Scalars of before the step: losses, gradient norms where they are clipped, and what to watch.
        """
        for optimizer in self.optimizers.values():
            optimizer.param_groups[0]["lr"] = learning_rate
            optimizer.zero_grad(set_to_none=True)
        state = self.normalizer.observation(batch.observation.to(self.device, non_blocking=True))
        action = batch.action.to(self.device, non_blocking=True)
        goal = self.normalizer.goal(batch.goal.to(self.device, non_blocking=True))

        goal_representation = self.critic.encode_goal(goal)
        logits = pairwise_energy(
            self.critic.encode_state_action(state, action), goal_representation, self.run.contrastive
        )
        critic_loss = contrastive_loss(logits, self.run.contrastive)
        critic_loss.backward()
        metrics = {"critic_loss": critic_loss.detach(), **contrastive_metrics(logits.detach())}
        # Both take their gradients at the same weights, so the goals' representations serve the actor too.
        metrics |= self._actor_gradients(state, goal, goal_representation.detach())
        if limit := self.run.optimisation.max_grad_norm:
            metrics["critic_grad_norm"] = nn.utils.clip_grad_norm_(self.critic.parameters(), limit)
            metrics["actor_grad_norm"] = nn.utils.clip_grad_norm_(self.actor.parameters(), limit)
        for optimizer in self.optimizers.values():
            optimizer.step()
        return metrics

    @torch.no_grad()
    def parameter_norm(self) -> Tensor:
        """The norm of all parameters together; not finite where one of their numbers is not."""
        parameters: list[Tensor] = [*self.actor.parameters(), *self.critic.parameters()]
        if self.log_alpha is not None:
            parameters.append(self.log_alpha)
        return nn.utils.get_total_norm(parameters)

    def _actor_gradients(self, state: Tensor, goal: Tensor, goal_representation: Tensor) -> dict[str, Tensor]:
        num_random = round(self.run.actor.random_goal_share * len(goal))
        if num_random:
            # The batch is in no order, so its neighbour's goal is a random one.
            goal, goal_representation = (
                torch.cat([tensor.roll(1, 0)[:num_random], tensor[num_random:]])
                for tensor in (goal, goal_representation)
            )
        self.critic.requires_grad_(False)  # only a way for the actor's gradient here
        action, log_prob = self.actor.sample(torch.cat([state, goal], dim=-1), generator=self.generator)
        representation = self.critic.encode_state_action(state, action)
        energy = paired_energy(representation, goal_representation, self.run.contrastive)
        loss = actor_loss(energy, log_prob, self.log_alpha)
        loss.backward()
        self.critic.requires_grad_(True)
        metrics = {"actor_loss": loss.detach(), "energy": energy.detach().mean(), "entropy": -log_prob.detach().mean()}
        if self.log_alpha is not None:
            alpha_loss = temperature_loss(log_prob, self.log_alpha, self._target_entropy)
            alpha_loss.backward()
            metrics |= {"alpha": self.log_alpha.detach().exp(), "alpha_loss": alpha_loss.detach()}
        return metrics

    def _adam(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Adam:
        step = self.run.optimisation
        # Fused: a deep network has thousands of small tensors, and one kernel for all costs less than one for each.
        return torch.optim.Adam(parameters, lr=0.0, betas=(step.adam_beta1, step.adam_beta2), fused=True)
