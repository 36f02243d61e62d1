"""A policy's training of a few seconds, for tests."""

from __future__ import annotations

from gated_serving.rl.settings import (
    CollectionSettings,
    EnvironmentSettings,
    EvaluationSettings,
    NetworkSettings,
    ReplaySettings,
    RuntimeSettings,
    StageSettings,
    TrainingRun,
)
from gated_serving.run_settings import apply_overrides

ENVIRONMENT = "tiny_goal_environment:PointReach"


def tiny_run(*overrides: str) -> TrainingRun:
    """Eight rounds of 40 steps and 4 updates in three stages, with a checkpoint every 2 rounds."""
    sizes = {"num_updates": 12, "learning_rate": 1e-3}
    run = TrainingRun(
        name="tiny",
        environment=EnvironmentSettings(id=ENVIRONMENT),
        networks=NetworkSettings(actor_depth=4, critic_depth=4, width=16, representation_size=8),
        collection=CollectionSettings(num_environments=4, round_length=10, num_random_steps=100),
        replay=ReplaySettings(capacity=2_000, gamma=0.9),
        pretrain=StageSettings(num_environment_steps=120, batch_size=64, warmup_share=0.5, **sizes),
        explore=StageSettings(num_environment_steps=120, batch_size=32, warmup_share=0.2, **sizes),
        finetune=StageSettings(
            num_environment_steps=80, num_updates=8, batch_size=16, learning_rate=5e-4, warmup_share=0
        ),
        evaluation=EvaluationSettings(eval_rounds=4, num_episodes=8, num_final_episodes=8),
        runtime=RuntimeSettings(num_threads=1, save_rounds=2),
    )
    return apply_overrides(run, overrides)
