"""Goal environments: made from a name, checked, and stepped together over processes."""

from gated_serving.rl.environments.errors import (
    EnvironmentFailedError,
    GoalEnvironmentError,
    UnusableEnvironmentError,
)
from gated_serving.rl.environments.making import make_goal_environment
from gated_serving.rl.environments.spec import GoalEnvironmentSpec, spec_of
from gated_serving.rl.environments.vector import (
    GoalObservation,
    GoalStep,
    GoalVectorEnvironment,
    make_vector_environment,
)

__all__ = [
    "EnvironmentFailedError",
    "GoalEnvironmentError",
    "GoalEnvironmentSpec",
    "GoalObservation",
    "GoalStep",
    "GoalVectorEnvironment",
    "UnusableEnvironmentError",
    "make_goal_environment",
    "make_vector_environment",
    "spec_of",
]
