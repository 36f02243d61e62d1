"""A language model alone, as a plain locustfile.

locust -f loadtest/locustfile_llm.py --host http://127.0.0.1:8000
"""

from __future__ import annotations

from loadtest.locust_users import LlmLocustUser


class LlmUser(LlmLocustUser):
    """Asks the language model."""
