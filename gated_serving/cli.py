"""The one command, ``gated-serving``: parses, then calls. Rooms are imported inside their verb only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
    """Train, check, convert and serve gated-attention language models."""


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


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
