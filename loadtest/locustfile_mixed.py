"""Both servers at once: one user in five asks the language model, the others the policy server.

locust -f loadtest/locustfile_mixed.py --llm-host http://127.0.0.1:8000 --policy-host http://127.0.0.1:8100
"""

from __future__ import annotations

from loadtest.locust_users import LlmLocustUser, PolicyLocustUser


class LlmUser(LlmLocustUser):
    """Asks the language model."""

    weight = 1


class PolicyUser(PolicyLocustUser):
    """Asks the policy server."""

    weight = 4
