"""Named training runs. A recipe is a function that returns a whole configuration; overrides change few fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from gated_serving.rl.settings import (
    ActorSettings,
    CollectionSettings,
    EnvironmentSettings,
    EvaluationSettings,
    NetworkSettings,
    ReplaySettings,
    RuntimeSettings,
    TrainingRun,
    explore_stage,
    finetune_stage,
    pretrain_stage,
)


def fetch_reach() -> TrainingRun:
    """A robot arm's gripper to a point in space; 32 layers, minutes on two CPU cores."""
    return TrainingRun(
        name="fetch-reach",
        environment=EnvironmentSettings(id="FetchReach-v4"),
        networks=NetworkSettings(actor_depth=32, critic_depth=32, width=128, normalize_inputs=True),
        # Started at the paper's 1, the temperature would still keep the actor near uniform after hundreds of updates.
        actor=ActorSettings(initial_alpha=0.1),
        collection=CollectionSettings(num_environments=8, round_length=50, num_random_steps=4_000),
        # Goals further ahead than a few steps blur where exactly the gripper is: it stops short of the 5 cm asked for.
        replay=ReplaySettings(capacity=100_000, gamma=0.8),
        pretrain=pretrain_stage(num_environment_steps=2_000, num_updates=100),
        explore=explore_stage(num_environment_steps=3_200, num_updates=160),
        finetune=finetune_stage(num_environment_steps=6_000, num_updates=300),
        evaluation=EvaluationSettings(eval_rounds=4, num_episodes=50),
        runtime=RuntimeSettings(num_processes=2, save_rounds=4),
    )


def fetch_push() -> TrainingRun:
    """A puck pushed to a place on a table; the gripper stays closed."""
    return _fetch_with_object("fetch-push", "FetchPush-v4")


def fetch_slide() -> TrainingRun:
    """A puck hit so that it slides to a place out of the arm's reach."""
    return _fetch_with_object("fetch-slide", "FetchSlide-v4")


def fetch_pick_and_place() -> TrainingRun:
    """A box grasped and carried to a place on a table or above it."""
    return _fetch_with_object("fetch-pick-and-place", "FetchPickAndPlace-v4")


def point_maze() -> TrainingRun:
    """A ball pushed round the corner of a U-shaped maze."""
    return TrainingRun(
        name="point-maze",
        environment=EnvironmentSettings(id="PointMaze_UMaze-v3"),
        networks=NetworkSettings(actor_depth=32, critic_depth=32, width=128, normalize_inputs=True),
        actor=ActorSettings(initial_alpha=0.1),
        collection=CollectionSettings(num_environments=8, round_length=300, num_random_steps=30_000),
        replay=ReplaySettings(capacity=1_000_000, gamma=0.98),
        pretrain=pretrain_stage(num_environment_steps=48_000, num_updates=160),
        explore=explore_stage(num_environment_steps=48_000, num_updates=160),
        finetune=finetune_stage(num_environment_steps=96_000, num_updates=320),
        evaluation=EvaluationSettings(eval_rounds=8, num_episodes=48, success="any"),
        runtime=RuntimeSettings(num_processes=2, save_rounds=8),
    )


def ant_maze() -> TrainingRun:
    """A four-legged robot through a U-shaped maze; for a GPU and many environments."""
    return TrainingRun(
        name="ant-maze",
        environment=EnvironmentSettings(id="AntMaze_UMaze-v5"),
        networks=NetworkSettings(actor_depth=64, critic_depth=64),
        collection=CollectionSettings(num_environments=64, round_length=700, num_random_steps=448_000),
        replay=ReplaySettings(capacity=5_000_000, gamma=0.99),
        pretrain=pretrain_stage(num_environment_steps=10_000_000, num_updates=100_000),
        explore=explore_stage(num_environment_steps=20_000_000, num_updates=200_000),
        finetune=finetune_stage(num_environment_steps=10_000_000, num_updates=100_000),
        evaluation=EvaluationSettings(eval_rounds=10, num_episodes=128, success="any"),
        runtime=RuntimeSettings(num_processes=16, save_rounds=10),
    )


def metaworld_reach() -> TrainingRun:
    """Meta-World's arm to a point in space; its goal is taken from its observation."""
    return TrainingRun(
        name="metaworld-reach",
        environment=EnvironmentSettings(id="metaworld:reach-v3"),
        networks=NetworkSettings(actor_depth=32, critic_depth=32, width=128, normalize_inputs=True),
        actor=ActorSettings(initial_alpha=0.1),
        collection=CollectionSettings(num_environments=8, round_length=500, num_random_steps=8_000),
        replay=ReplaySettings(capacity=500_000, gamma=0.9),
        pretrain=pretrain_stage(num_environment_steps=40_000, num_updates=500),
        explore=explore_stage(num_environment_steps=80_000, num_updates=1_000),
        finetune=finetune_stage(num_environment_steps=40_000, num_updates=500),
        evaluation=EvaluationSettings(eval_rounds=5, num_episodes=40, success="any"),
        runtime=RuntimeSettings(num_processes=2, save_rounds=5),
    )


def _fetch_with_object(name: str, environment: str) -> TrainingRun:
    """The arm has to find the object first; until then every goal it could learn from is where the object lies.

    A quarter of an hour on two CPU cores: a start, far short of the million steps that the task takes. Lengthen
    ``explore`` to go further.
    """
    reach = fetch_reach()
    return dataclasses.replace(
        reach,
        name=name,
        environment=EnvironmentSettings(id=environment),
        actor=ActorSettings(initial_alpha=0.1, random_goal_share=0.5),
        collection=CollectionSettings(num_environments=16, round_length=50, num_random_steps=16_000),
        replay=ReplaySettings(capacity=1_000_000, gamma=0.98),
        pretrain=pretrain_stage(num_environment_steps=32_000, num_updates=200),
        explore=explore_stage(num_environment_steps=64_000, num_updates=800),
        finetune=finetune_stage(num_environment_steps=32_000, num_updates=800),
        evaluation=EvaluationSettings(eval_rounds=20, num_episodes=64),
        runtime=RuntimeSettings(num_processes=2, save_rounds=20),
    )


RECIPES: dict[str, Callable[[], TrainingRun]] = {
    "fetch-reach": fetch_reach,
    "fetch-push": fetch_push,
    "fetch-slide": fetch_slide,
    "fetch-pick-and-place": fetch_pick_and_place,
    "point-maze": point_maze,
    "ant-maze": ant_maze,
    "metaworld-reach": metaworld_reach,
}
"""Every recipe by the name the command line knows."""


def find_recipe(name: str) -> TrainingRun:
    """The configuration of a recipe.

    Raises:
        ValueError: There is no such recipe.
    """
    if name not in RECIPES:
        raise ValueError(f"there is no recipe {name!r}; known are {', '.join(RECIPES)}")
    return RECIPES[name]()
