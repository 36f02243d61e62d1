"""A policy server alone, as a plain locustfile.

locust -f loadtest/locustfile_policy.py --host http://127.0.0.1:8100
"""

from __future__ import annotations

from loadtest.locust_users import PolicyLocustUser


class PolicyUser(PolicyLocustUser):
    """Asks the policy server."""
