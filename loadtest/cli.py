"""``gated-serving loadtest``: parses, then calls."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

_HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    name="loadtest",
    help="Load tests of OpenAI-compatible servers and policy servers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=_HELP_OPTIONS,
)

# How much load.
Users = Annotated[int, typer.Option(help="Closed loop: users, who ask again when they are answered.")]
Rate = Annotated[
    float | None,
    typer.Option(help="Open loop instead: requests a second, whatever the server does.", show_default=False),
]
Arrival = Annotated[str, typer.Option(help="Open loop: constant or poisson.")]
Shape = Annotated[str, typer.Option(help="steady, ramp or steps, from --start to --users or --rate.")]
Start = Annotated[float, typer.Option(help="Users or rate at the start of a ramp or of steps.")]
Steps = Annotated[int, typer.Option(help="Number of steps.")]
Duration = Annotated[float, typer.Option(help="Seconds that are measured.")]
Warmup = Annotated[float, typer.Option(help="Seconds before that, left out of the figures.")]
Requests = Annotated[int | None, typer.Option(help="Stop after so many measured requests.", show_default=False)]
Timeout = Annotated[float, typer.Option(help="Seconds after which a request has failed.")]
MaxInFlight = Annotated[int, typer.Option(help="Open loop: requests under way in one process at most.")]
Seed = Annotated[int, typer.Option(help="Of arrivals, prompts and observations.")]
Processes = Annotated[int, typer.Option(help="Generator processes.")]
# What has to hold, and what is left behind.
Slos = Annotated[
    list[str] | None,
    typer.Option("--slo", help="NAME=VALUE, such as p99_latency_ms=50; may be given again.", show_default=False),
]
SweepFlag = Annotated[
    bool, typer.Option("--sweep", help="Find the highest load that holds every --slo, from --users or --rate on.")
]
SweepLimit = Annotated[float, typer.Option(help="The highest load that a sweep tries.")]
SweepPrecision = Annotated[float, typer.Option(help="A sweep stops at that relative precision.")]
Output = Annotated[Path, typer.Option(help="Folder for report.html, summary.json, the records and server metrics.")]
Records = Annotated[str, typer.Option(help="auto, jsonl or parquet.")]
Web = Annotated[int | None, typer.Option("--web", help="Port for locust's own page.", show_default=False)]
Bind = Annotated[str | None, typer.Option(help="HOST:PORT where other machines' workers join.", show_default=False)]
ExpectWorkers = Annotated[int, typer.Option(help="Workers on other machines to wait for; see loadtest worker.")]
Ceiling = Annotated[bool, typer.Option(help="Measure first how much this generator can send at all.")]
# Whom to ask.
ApiKey = Annotated[
    str | None,
    typer.Option(help="Sent as a bearer token.", envvar="GATED_SERVING_LOADTEST_API_KEY", show_default=False),
]
Headers = Annotated[
    list[str] | None, typer.Option("--header", help="NAME: VALUE; may be given again.", show_default=False)
]
Model = Annotated[str | None, typer.Option(help="Name of the model; the first that is served if not given.")]
EndpointName = Annotated[str, typer.Option(help="chat or completions.")]
InputTokens = Annotated[str, typer.Option(help="Prompt lengths: MEAN[:DISTRIBUTION[:SPREAD]], such as 128:normal:0.3.")]
OutputTokens = Annotated[str, typer.Option(help="Answer lengths asked for, in the same form.")]
IgnoreEos = Annotated[bool, typer.Option(help="Let answers have exactly their length (vLLM's ignore_eos).")]
PrefixTokens = Annotated[int, typer.Option(help="Tokens that prompts share at their head.")]
Prefixes = Annotated[int, typer.Option(help="Number of such heads.")]
Turns = Annotated[int, typer.Option(help="Turns of a conversation.")]
Prompts = Annotated[Path | None, typer.Option(help="JSON lines of your own: prompt or messages, and max_tokens.")]
Temperature = Annotated[float, typer.Option(help="Sampling temperature.")]
PolicyName = Annotated[str | None, typer.Option(help="Name of the policy; the first that is live if not given.")]
ProtocolName = Annotated[str, typer.Option(help="json, binary (tensors) or websocket.")]
ControlHz = Annotated[
    float | None,
    typer.Option(help="Each user acts at this rate; late answers are missed deadlines.", show_default=False),
]
Rows = Annotated[int, typer.Option(help="Observations in one request.")]
Deterministic = Annotated[bool, typer.Option(help="The best action, or a drawn one.")]
Observations = Annotated[Path | None, typer.Option(help="JSON lines of your own, one observation each.")]
Url = Annotated[str, typer.Argument(help="The server, such as http://127.0.0.1:8000.", show_default=False)]

_OUTPUT = Path("loadtest-results")


def _command_line() -> str:
    words = list(sys.argv[1:])
    for index, word in enumerate(words):
        if word.startswith("--api-key="):
            words[index] = "--api-key=***"
        elif word in ("--api-key", "--header") and index + 1 < len(words):
            words[index + 1] = "***"
    return shlex.join(["gated-serving", "loadtest", *words])


def _load(
    users: int,
    rate: float | None,
    arrival: str,
    warmup: float,
    duration: float,
    timeout: float,
    seed: int,
    **further: Any,
) -> Any:
    from loadtest.settings import LoadSettings

    chosen: dict[str, Any] = {"arrival": arrival, **further}  # checked there
    chosen |= {"mode": "closed", "users": users} if rate is None else {"mode": "open", "rate_per_s": rate}
    return LoadSettings(warmup_s=warmup, duration_s=duration, timeout_s=timeout, seed=seed, **chosen)


def _common(options: dict[str, Any]) -> dict[str, Any]:
    """A plan's fields that every kind has."""
    from loadtest.plan import SweepSettings
    from loadtest.settings import one_of
    from loadtest.slo import parse_slos

    one_of("records", options["records"], ("auto", "jsonl", "parquet"))
    sweep = (
        SweepSettings(limit=options["sweep_limit"], precision=options["sweep_precision"])
        if options.get("sweep")
        else None
    )
    return {
        "slos": parse_slos(options["slo"] or ()),
        "sweep": sweep,
        "output": options["output"],
        "records": options["records"],
        "processes": options["processes"],
        "expect_workers": options["expect_workers"],
        "bind": options["bind"],
        "web_port": options["web"],
        "measure_ceiling": options["ceiling"],
        "command": _command_line(),
    }


def _full_load(options: dict[str, Any]) -> Any:
    names = ("users", "rate", "arrival", "warmup", "duration", "timeout", "seed")
    return _load(
        **{name: options[name] for name in names},
        shape=options["shape"],
        start=options["start"],
        num_steps=options["steps"],
        num_requests=options["requests"],
        max_in_flight=options["max_in_flight"],
    )


def _llm(url: str, options: dict[str, Any]) -> Any:
    from loadtest.options import parse_headers, parse_lengths
    from loadtest.settings import LlmSettings

    return LlmSettings(
        url=url,
        model=options["model"],
        endpoint=options["endpoint"],
        input_tokens=parse_lengths("input_tokens", options["input_tokens"]),
        output_tokens=parse_lengths("output_tokens", options["output_tokens"]),
        ignore_eos=options["ignore_eos"],
        prefix_tokens=options["prefix_tokens"],
        num_prefixes=options["prefixes"],
        turns=options["turns"],
        prompts=options["prompts"],
        temperature=options["temperature"],
        api_key=options["api_key"],
        headers=parse_headers(options["header"] or []),
    )


def _policy(url: str, options: dict[str, Any]) -> Any:
    from loadtest.options import parse_headers
    from loadtest.settings import PolicySettings

    return PolicySettings(
        url=url,
        policy=options["policy"],
        protocol=options["protocol"],
        control_hz=options["control_hz"],
        rows=options["rows"],
        deterministic=options["deterministic"],
        observations=options["observations"],
        api_key=options["api_key"],
        headers=parse_headers(options["header"] or []),
    )


@app.command("llm")
def load_llm(
    url: Url = "",
    model: Model = None,
    endpoint: EndpointName = "chat",
    users: Users = 8,
    rate: Rate = None,
    arrival: Arrival = "poisson",
    shape: Shape = "steady",
    start: Start = 1.0,
    steps: Steps = 5,
    duration: Duration = 30.0,
    warmup: Warmup = 5.0,
    requests: Requests = None,
    input_tokens: InputTokens = "128",
    output_tokens: OutputTokens = "64",
    ignore_eos: IgnoreEos = True,
    prefix_tokens: PrefixTokens = 0,
    prefixes: Prefixes = 1,
    turns: Turns = 1,
    prompts: Prompts = None,
    temperature: Temperature = 0.0,
    slo: Slos = None,
    sweep: SweepFlag = False,
    sweep_limit: SweepLimit = 100_000.0,
    sweep_precision: SweepPrecision = 0.05,
    output: Output = _OUTPUT,
    records: Records = "auto",
    api_key: ApiKey = None,
    header: Headers = None,
    timeout: Timeout = 120.0,
    max_in_flight: MaxInFlight = 4096,
    seed: Seed = 0,
    processes: Processes = 1,
    bind: Bind = None,
    expect_workers: ExpectWorkers = 0,
    web: Web = None,
    ceiling: Ceiling = True,
) -> None:
    """Load an OpenAI-compatible server with streamed requests.

    Exit codes: 0 every --slo holds; 3 one does not; 2 bad usage or a dead server; 1 the run ended before its time;
    130 stopped by Ctrl-C, 143 by SIGTERM.
    """
    options = dict(locals())
    from loadtest.command import run_command
    from loadtest.plan import Plan

    raise typer.Exit(
        run_command(lambda: Plan(llm=_llm(url, options), llm_load=_full_load(options), **_common(options)))
    )


@app.command("policy")
def load_policy(
    url: Url = "",
    policy: PolicyName = None,
    protocol: ProtocolName = "json",
    users: Users = 8,
    control_hz: ControlHz = None,
    rate: Rate = None,
    arrival: Arrival = "poisson",
    shape: Shape = "steady",
    start: Start = 1.0,
    steps: Steps = 5,
    duration: Duration = 30.0,
    warmup: Warmup = 5.0,
    requests: Requests = None,
    rows: Rows = 1,
    deterministic: Deterministic = True,
    observations: Observations = None,
    slo: Slos = None,
    sweep: SweepFlag = False,
    sweep_limit: SweepLimit = 100_000.0,
    sweep_precision: SweepPrecision = 0.05,
    output: Output = _OUTPUT,
    records: Records = "auto",
    api_key: ApiKey = None,
    header: Headers = None,
    timeout: Timeout = 10.0,
    max_in_flight: MaxInFlight = 4096,
    seed: Seed = 0,
    processes: Processes = 1,
    bind: Bind = None,
    expect_workers: ExpectWorkers = 0,
    web: Web = None,
    ceiling: Ceiling = True,
) -> None:
    """Load a policy server, as control loops or as an open stream of requests.

    Exit codes: 0 every --slo holds; 3 one does not; 2 bad usage or a dead server; 1 the run ended before its time;
    130 stopped by Ctrl-C, 143 by SIGTERM.
    """
    options = dict(locals())
    from loadtest.command import run_command
    from loadtest.plan import Plan

    raise typer.Exit(
        run_command(lambda: Plan(policy=_policy(url, options), policy_load=_full_load(options), **_common(options)))
    )


@app.command("mixed")
def load_both(
    llm_url: Url = "",
    policy_url: Url = "",
    model: Model = None,
    endpoint: EndpointName = "chat",
    llm_users: Users = 4,
    llm_rate: Rate = None,
    input_tokens: InputTokens = "128",
    output_tokens: OutputTokens = "64",
    policy: PolicyName = None,
    protocol: ProtocolName = "json",
    policy_users: Users = 8,
    policy_rate: Rate = None,
    control_hz: ControlHz = None,
    arrival: Arrival = "poisson",
    duration: Duration = 30.0,
    warmup: Warmup = 5.0,
    slo: Slos = None,
    output: Output = _OUTPUT,
    records: Records = "auto",
    api_key: ApiKey = None,
    header: Headers = None,
    timeout: Timeout = 120.0,
    seed: Seed = 0,
    processes: Processes = 1,
    bind: Bind = None,
    expect_workers: ExpectWorkers = 0,
    web: Web = None,
    ceiling: Ceiling = True,
) -> None:
    """Load both servers at once.

    An --slo names its server: llm.p99_ttft_ms=500, policy.p99_latency_ms=50. Exit codes as those of llm and policy.
    """
    options: dict[str, Any] = dict(locals())
    options |= {"ignore_eos": True, "prefix_tokens": 0, "prefixes": 1, "turns": 1, "prompts": None, "temperature": 0.0}
    options |= {"rows": 1, "deterministic": True, "observations": None}
    from loadtest.command import run_command
    from loadtest.plan import Plan

    def plan() -> Plan:
        shared = (arrival, warmup, duration, timeout, seed)
        return Plan(
            llm=_llm(llm_url, options),
            llm_load=_load(llm_users, llm_rate, *shared),
            policy=_policy(policy_url, options),
            policy_load=_load(policy_users, policy_rate, *shared),
            **_common(options),
        )

    raise typer.Exit(run_command(plan))


@app.command("compare")
def compare_runs(
    before: Annotated[Path, typer.Argument(help="Output folder of the first run.")],
    after: Annotated[Path, typer.Argument(help="Output folder of the second.")],
    output: Annotated[
        Path | None, typer.Option(help="The page; comparison.html in the second folder if not given.")
    ] = None,
    fail_on_regression: Annotated[
        bool, typer.Option("--fail-on-regression", help="Exit with 3 when a figure is worse by more than noise.")
    ] = False,
) -> None:
    """Compare two runs: a table, charts, and what changed more than noise."""
    from loadtest.command import compare_command

    raise typer.Exit(compare_command(before, after, output=output, fail_on_regression=fail_on_regression))


@app.command("worker")
def join(
    address: Annotated[str, typer.Argument(help="HOST:PORT of a load test that was started with --bind.")],
) -> None:
    """Send requests for a load test that runs on another machine, until it ends."""
    from loadtest.command import worker_command

    raise typer.Exit(worker_command(address))
