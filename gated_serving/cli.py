"""The one command, ``gated-serving``: parses, then calls. Rooms are imported inside their verb only."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from gated_serving import __version__

_HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=_HELP_OPTIONS,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"gated-serving {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """From training to serving: gated-attention language models, and goal-reaching policies up to 1,000 layers deep."""


@app.command("train-llm")
def train_llm(
    recipe: Annotated[str | None, typer.Argument(help="Name of the recipe.", show_default=False)] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Fields to change, each section.field=value.", show_default=False)
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder of the run; runs/RECIPE if not given.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last whole checkpoint.")] = False,
    show: Annotated[bool, typer.Option("--list", help="List the recipes and stop.")] = False,
) -> None:
    """Train a language model from a recipe.

    A run that was stopped or killed goes on with --resume, in the settings it was started with. Overrides name a
    section (model, data, tokenizer, optimisation, runtime) and a field of gated_serving.llm.training.settings. The
    output folder holds metrics.jsonl and TensorBoard's files beside the checkpoints.

    Exit codes: 0 done; 2 what was asked for cannot be done; 130 stopped by Ctrl-C.
    """
    from gated_serving.llm.training.command import run_command

    raise typer.Exit(run_command(recipe, overrides or [], output=output, resume=resume, list_recipes=show))


@app.command("train-rl")
def train_rl(
    recipe: Annotated[str | None, typer.Argument(help="Name of the recipe.", show_default=False)] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Fields to change, each section.field=value.", show_default=False)
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder of the run; runs/RECIPE if not given.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")] = False,
    show: Annotated[bool, typer.Option("--list", help="List the recipes and stop.")] = False,
) -> None:
    """Train a goal-reaching policy from a recipe.

    A run that was stopped or killed goes on with --resume, in the settings it was started with. Overrides name a
    section (environment, networks, pretrain, evaluation, runtime and others; see --list) and a field of
    gated_serving.rl.settings; environment.id=package.module:name trains in an environment of your own. The output
    folder holds the learning curve, metrics.jsonl and TensorBoard's files beside the checkpoints.

    Exit codes: 0 done; 1 the training failed; 2 what was asked for cannot be done; 130 stopped by Ctrl-C, 143 by
    SIGTERM, both after saving.
    """
    from gated_serving.rl.training.command import run_command

    raise typer.Exit(run_command(recipe, overrides or [], output=output, resume=resume, list_recipes=show))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, **_HELP_OPTIONS})
def serve(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="Checkpoint folder, or a shipped model's name; tiny-python if not given.", show_default=False
        ),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; 127.0.0.1 if not given.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 8000 if not given, 0 for any free one.")] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Let in only requests that carry this key; may be repeated.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show vLLM's whole log.")] = False,
) -> None:
    """Serve a model through vLLM's OpenAI-compatible API.

    The doctor checks first that it can be served right.

    Any further option is vLLM's own, such as --max-model-len 512; those you give win over what is chosen here.
    On a CPU these are chosen: --dtype (the checkpoint's), --enforce-eager (--no-enforce-eager compiles),
    --kv-cache-memory-bytes and OMP_NUM_THREADS. Everywhere: --structured-outputs-config (JSON without blanks), and
    VLLM_NO_USAGE_STATS=1.

    Exit codes: 0 stopped by Ctrl-C or SIGTERM; 1 the model cannot be served right; 2 a wrong option, or a folder
    that cannot be read; 3 this machine lacks something (free port, memory, vLLM); 4 vLLM failed.
    """
    from gated_serving.llm.serving import ServeError, serve_command

    tokens = [*([model] if model is not None else []), *context.args]
    try:
        serve_command(tokens, host=host, port=port, api_keys=api_key or [], verbose=verbose, say=typer.echo)
    except ServeError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from None


@app.command()
def doctor(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, or a repository in the hub's local cache.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Say what a checkpoint is, and whether it can be served right.

    Reads its config and tensor headers only.

    Exit codes: 0 it can be served right; 1 it cannot; 2 it cannot be read.
    """
    from gated_serving.llm.checkpoints.command import run_doctor

    raise typer.Exit(run_doctor(model, as_json=as_json))


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Gated checkpoint folder, or a repository on the hub.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Folder to make.")],
    packing: Annotated[
        str | None,
        typer.Option(help="Where the gate's rows shall lie: kv_group, per_head or separate. As they are if not given."),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest weight file, such as 2GB or 500MiB.")] = "2GB",
) -> None:
    """Convert a gated checkpoint into the project's own format.

    Bit for bit, and a conversion that was killed goes on where it stopped.

    Exit codes: 0 done; 1 refused or failed; 2 the source or an option cannot be read.
    """
    from gated_serving.llm.checkpoints.command import run_convert

    raise typer.Exit(run_convert(source, target, packing=packing, max_shard_size=max_shard_size))


@app.command("export-policy")
def export_policy(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="Checkpoint folder of train-rl, Stable-Baselines3 .zip, rsl_rl .pt, or package.module:factory."
        ),
    ],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Model repository; NAME/VERSION/ is made in it.")],
    precision: Annotated[str, typer.Option(help="fp32, fp16 or int8.")] = "fp32",
    engine: Annotated[str, typer.Option(help="onnx or tensorrt.")] = "onnx",
    outputs: Annotated[
        str, typer.Option(help="action, or distribution for sampled actions: noise becomes an input.")
    ] = "action",
    name: Annotated[str | None, typer.Option(help="The policy's name; from the checkpoint if not given.")] = None,
    policy_version: Annotated[int | None, typer.Option(help="Its version; the next number if not given.")] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Largest error allowed, in units of half the action's range.")
    ] = None,
    episodes: Annotated[
        int, typer.Option(help="Episodes that compare fp16 or int8 with fp32 in the environment; 0 for none.")
    ] = 100,
    environment: Annotated[str | None, typer.Option(help="The environment, if the checkpoint names none.")] = None,
    control_period: Annotated[float | None, typer.Option(help="Seconds between two actions.")] = None,
    observation: Annotated[
        list[str] | None,
        typer.Option(help="rsl_rl, modules: an observation field as name=size or name=2x3; in order."),
    ] = None,
    action_low: Annotated[str | None, typer.Option(help="rsl_rl, modules: lower bounds, such as -1 or -1,-2.")] = None,
    action_high: Annotated[str | None, typer.Option(help="rsl_rl, modules: upper bounds.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="rsl_rl: the run's configuration; params/agent.yaml beside it if not given.")
    ] = None,
    vec_normalize: Annotated[
        Path | None, typer.Option(help="Stable-Baselines3: the file VecNormalize.save wrote.")
    ] = None,
    trust_pickle: Annotated[
        bool, typer.Option("--trust-pickle", help="Stable-Baselines3: run the classes of your own that the file names.")
    ] = False,
) -> None:
    """Export a trained policy whole: one ONNX file with normaliser, scaling and clipping inside, and policy.json.

    The file is compared with the policy in float64 on random observations; if they differ, nothing is written. A
    version that exists is never overwritten.

    Exit codes: 0 done; 1 refused or failed; 2 the checkpoint or an option cannot be read; 130 stopped by Ctrl-C.
    """
    try:
        from policy_server.export.command import run_export
        from policy_server.export.sources import SourceOptions
    except ModuleNotFoundError as error:
        typer.echo(f"error: {error.name} is not installed: pip install 'gated-serving[train]'", err=True)
        raise typer.Exit(1) from None

    raise typer.Exit(
        run_export(
            checkpoint,
            destination,
            precision=precision,
            engine=engine,
            outputs=outputs,
            name=name,
            version=policy_version,
            tolerance=tolerance,
            num_episodes=episodes,
            source_options=SourceOptions(
                vec_normalize=vec_normalize,
                trust_pickle=trust_pickle,
                config=config,
                observation=tuple(observation or ()),
                action_low=action_low,
                action_high=action_high,
                control_period_s=control_period,
                environment=environment,
            ),
            make_environment=_make_goal_environment,
        )
    )


@app.command("serve-policy")
def serve_policy(
    repository: Annotated[
        Path | None,
        typer.Argument(help="Folder of NAME/VERSION/ as export-policy writes it; the shipped policies if not given."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; 127.0.0.1 if not given.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 8100 if not given, 0 for any free one.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="Port for gRPC; off if not given.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes behind the port; 1 if not given.")] = None,
    engine: Annotated[str | None, typer.Option(help="onnxruntime, cuda or tensorrt; onnxruntime if not given.")] = None,
    max_batch: Annotated[int | None, typer.Option(help="Observations of one run; 64 if not given.")] = None,
    max_delay_ms: Annotated[float | None, typer.Option(help="How long an idle engine waits for more; 0.")] = None,
    max_queue: Annotated[int | None, typer.Option(help="Observations that may wait; 1024. More get 503.")] = None,
    deadline_ms: Annotated[float | None, typer.Option(help="How long one may wait; 5000. Later ones get 504.")] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Let in only requests that carry this key; may be repeated.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Let pages of this origin call; may be repeated, * for all.")
    ] = None,
    watch: Annotated[bool | None, typer.Option("--watch/--no-watch", help="Make new versions live by itself.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log what is loaded, not only what goes wrong.")] = False,
) -> None:
    """Serve exported policies over HTTP, WebSocket and gRPC, batched over all who ask.

    Every option is an environment variable too, GATED_SERVING_POLICY_PORT and so on; NAME/serving.json changes the
    batching of one policy. A new version folder goes live by itself, without a lost request.

    Exit codes: 0 stopped by Ctrl-C or SIGTERM; 1 no policy can be served; 2 a wrong option; 3 this machine lacks
    something (free port, package, GPU).
    """
    try:
        from policy_server.command import serve_policy_command
        from policy_server.errors import StartError
    except ModuleNotFoundError as error:
        typer.echo(f"error: {error.name} is not installed: pip install 'gated-serving[policy]'", err=True)
        raise typer.Exit(3) from None

    batching = {
        "max_batch": max_batch,
        "max_delay_ms": max_delay_ms,
        "max_queue": max_queue,
        "deadline_ms": deadline_ms,
    }
    try:
        code = serve_policy_command(
            say=typer.echo,
            verbose=verbose,
            repository=repository,
            host=host,
            port=port,
            grpc_port=grpc_port,
            workers=workers,
            engine=engine,
            batching=batching,
            api_keys=api_key,
            cors_origins=cors_origin,
            watch=watch,
        )
    except StartError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from None
    raise typer.Exit(code)


@app.command(
    "loadtest",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def load_test(context: typer.Context) -> None:
    """Load-test a server: llm URL, policy URL, mixed URL URL, compare A B; see loadtest --help.

    Exit codes: 0 every --slo holds; 3 one does not; 2 bad usage or a dead server; 1 the run ended before its time;
    130 stopped by Ctrl-C, 143 by SIGTERM.
    """
    missing = [name for name in ("locust", "plotly", "websockets", "orjson") if find_spec(name) is None]
    if missing:
        typer.echo(f"error: {missing[0]} is not installed: pip install 'gated-serving[loadtest]'", err=True)
        raise typer.Exit(3)
    # In a process of its own: gevent has to change the standard library before anything else has used it.
    os.execv(sys.executable, [sys.executable, "-m", "loadtest", *context.args])  # noqa: S606


def _make_goal_environment(environment: str, **kwargs: Any) -> Any:
    from gated_serving.rl.environments import make_goal_environment

    return make_goal_environment(environment, **kwargs)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
