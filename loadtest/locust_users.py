"""Users for plain locustfiles: they ask as the load tests do, and tell locust of every request.

locust's own page and console then show a row for the answers, one for the time to first token and one for inter-token
latencies. What these users do not have is open loop, warm-up and reports; ``gated-serving loadtest`` has those.
"""

from __future__ import annotations

import logging
import time
from typing import Any, NoReturn

from locust import User, events, task
from locust.exception import StopUser

from loadtest.errors import DeadServerError, UsageError
from loadtest.generator import Caller, LlmCaller, PolicyCaller
from loadtest.observations import drawn_observations
from loadtest.options import parse_lengths
from loadtest.policy_client import EncodedObservation
from loadtest.prompts import PromptSource
from loadtest.records import RequestRecord
from loadtest.settings import LlmSettings, PolicySettings
from loadtest.targets import LlmTarget, PolicyTarget, check_llm, check_policy

logger = logging.getLogger(__name__)

_TIMEOUT_S = 120.0


@events.init_command_line_parser.add_listener
def add_options(parser: Any) -> None:
    """What can be set beside locust's own options; each is an environment variable LOCUST_... too."""
    group = parser.add_argument_group("gated-serving")
    for name, default, text in (
        ("--llm-host", "", "address of the language model's server; --host if not given"),
        ("--policy-host", "", "address of the policy server; --host if not given"),
        ("--model", "", "name of the model; the first that is served if not given"),
        ("--endpoint", "chat", "chat or completions"),
        ("--input-tokens", "128", "prompt lengths, MEAN[:DISTRIBUTION[:SPREAD]]"),
        ("--output-tokens", "64", "answer lengths, in the same form"),
        ("--policy", "", "name of the policy; the first that is live if not given"),
        ("--protocol", "json", "json, binary or websocket"),
        ("--bearer-key", "", "API key, sent as a bearer token"),
    ):
        group.add_argument(
            name, default=default, help=text, env_var=f"LOCUST_{name.strip('-').replace('-', '_').upper()}"
        )
    group.add_argument(
        "--control-hz", type=float, default=0.0, help="rate at which each policy user acts", env_var="LOCUST_CONTROL_HZ"
    )


class _AskingUser(User):
    abstract = True
    _caller: Caller

    def on_stop(self) -> None:
        """Hangs up."""
        self._caller.close()

    def ask(self) -> RequestRecord:
        """One request, told to locust."""
        record = self._caller.call()
        fire = self.environment.events.request.fire
        failed = record.error is not None
        fire(
            request_type=record.kind,
            name="answer",
            response_time=record.service_ms or 0.0,
            response_length=record.received_bytes,
            exception=RuntimeError(f"{record.error}: {record.message}") if failed else None,
            context={},
        )
        if record.ttft_ms is not None and not failed:
            times = [("first token", record.ttft_ms), *(("inter-token", value) for value in record.itl_ms)]
            for name, value in times:
                fire(
                    request_type=record.kind,
                    name=name,
                    response_time=value,
                    response_length=0,
                    exception=None,
                    context={},
                )
        return record


class LlmLocustUser(_AskingUser):
    """Asks an OpenAI-compatible server, streamed, again as soon as it is answered."""

    abstract = True
    host = "http://127.0.0.1:8000"
    _target: LlmTarget | None = None
    _num_made = 0

    def on_start(self) -> None:
        """Finds the model; the first user of a process does so for all."""
        cls = type(self)
        if cls._target is None:
            options = self.environment.parsed_options
            try:
                settings = LlmSettings(
                    url=options.llm_host or self.host or "",
                    model=options.model or None,
                    endpoint=options.endpoint,
                    input_tokens=parse_lengths("input_tokens", options.input_tokens),
                    output_tokens=parse_lengths("output_tokens", options.output_tokens),
                    api_key=options.bearer_key or None,
                )
                cls._target = check_llm(settings, timeout_s=_TIMEOUT_S)
            except (UsageError, DeadServerError) as error:
                _give_up(self, error)
        cls._num_made += 1
        target = cls._target
        source = PromptSource(target.settings, target.words, seed=_seed(self, cls._num_made))
        self._caller = LlmCaller(target, source, timeout_s=_TIMEOUT_S)

    @task
    def chat(self) -> None:
        """One request."""
        self.ask()


class PolicyLocustUser(_AskingUser):
    """Asks a policy server, at the control rate if there is one."""

    abstract = True
    host = "http://127.0.0.1:8100"
    _target: PolicyTarget | None = None
    _num_made = 0

    def on_start(self) -> None:
        """Finds the policy; the first user of a process does so for all."""
        cls = type(self)
        options = self.environment.parsed_options
        if cls._target is None:
            try:
                settings = PolicySettings(
                    url=options.policy_host or self.host or "",
                    policy=options.policy or None,
                    protocol=options.protocol,
                    control_hz=options.control_hz or None,
                    api_key=options.bearer_key or None,
                )
                cls._target = check_policy(settings)
            except (UsageError, DeadServerError) as error:
                _give_up(self, error)
        target = cls._target
        cls._num_made += 1
        observations = drawn_observations(target.fields, rows=1, seed=_seed(self, cls._num_made))
        messages = [EncodedObservation(target.settings, observation) for observation in observations]
        self._caller = PolicyCaller(target, messages, 0, timeout_s=_TIMEOUT_S)
        self._due = time.perf_counter()

    @task
    def act(self) -> None:
        """One request; the rest of the control period is waited."""
        self.ask()

    def wait_time(self) -> float:
        """Until the next beat of the control loop; beats that have passed meanwhile are told to locust as missed."""
        assert self._target is not None
        if self._target.settings.control_hz is None:
            return 0.0
        period_s = 1 / self._target.settings.control_hz
        missed = max(0, int((time.perf_counter() - self._due) / period_s))
        if missed:
            self.environment.events.request.fire(
                request_type="act",
                name="beat",
                response_time=1e3 * period_s,
                response_length=0,
                exception=RuntimeError("missed deadline"),
                context={},
            )
        self._due += max(1, missed) * period_s
        return max(self._due - time.perf_counter(), 0.0)


def _seed(user: User, number: int) -> int:
    """Another one for every user of every process, and the same in every run."""
    worker = getattr(user.environment.runner, "worker_index", 0)
    return max(worker, 0) * 1_000_003 + number


def _give_up(user: User, error: Exception) -> NoReturn:
    """Ends locust with what is wrong, instead of a traceback for each user."""
    logger.error("%s", error)
    user.environment.process_exit_code = 2
    if user.environment.runner is not None:
        user.environment.runner.quit()
    raise StopUser
