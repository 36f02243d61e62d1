"""What can be wrong with an environment; the messages say what to do."""

from __future__ import annotations


class GoalEnvironmentError(Exception):
    """Base of the errors of this package."""


class UnusableEnvironmentError(GoalEnvironmentError):
    """The environment cannot be made, or is none that a goal-reaching policy can be trained in."""


class EnvironmentFailedError(GoalEnvironmentError):
    """An environment raised, gave values that cannot be used, or its process ended."""
