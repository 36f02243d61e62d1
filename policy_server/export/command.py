"""The verb ``export-policy`` of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.markup import escape

from policy_server.export.errors import ExportError, ParityError, UnreadableSourceError
from policy_server.export.pipeline import ExportOptions, export_policy
from policy_server.export.sources import SourceOptions, read_source
from policy_server.export.success import MakeEnvironment
from policy_server.manifest import MODEL_FILE, Engine, Manifest, Outputs, Precision

_Choice = TypeVar("_Choice", Outputs, Precision, Engine)

DONE, NOT_EXPORTED, UNREADABLE, INTERRUPTED = 0, 1, 2, 130


def run_export(
    source: str,
    destination: Path,
    *,
    precision: str,
    engine: str,
    outputs: str,
    name: str | None,
    version: int | None,
    tolerance: float | None,
    num_episodes: int,
    source_options: SourceOptions,
    make_environment: MakeEnvironment | None,
) -> int:
    """Exports a policy and says how well it agrees with its source.

    Returns:
        0 when done, 1 when refused or failed, 2 when the source or an option cannot be read.
    """
    progress = Console(stderr=True, soft_wrap=True)

    def say(what: str) -> None:
        progress.print(f"{escape(what)} ...", highlight=False)

    try:
        options = ExportOptions(
            name=name,
            version=version,
            outputs=_read_choice(Outputs, outputs, "--outputs"),
            precision=_read_choice(Precision, precision, "--precision"),
            engine=_read_choice(Engine, engine, "--engine"),
            tolerance=tolerance,
            num_episodes=num_episodes,
        )
        policy = read_source(source, source_options)
        folder, manifest = export_policy(policy, destination, options, make_environment=make_environment, say=say)
    except ExportError as error:
        nothing = "; nothing was written" if isinstance(error, ParityError) else ""
        progress.print(f"[bold red]error[/]: {escape(str(error))}{nothing}", highlight=False)
        return UNREADABLE if isinstance(error, UnreadableSourceError) else NOT_EXPORTED
    except KeyboardInterrupt:
        progress.print("[bold red]error[/]: interrupted; nothing was written", highlight=False)
        return INTERRUPTED
    out = Console(soft_wrap=True, highlight=False)
    for line in _summary(folder, manifest):
        out.print(escape(line))
    return DONE


def _summary(folder: Path, manifest: Manifest) -> list[str]:
    parity, size = manifest.parity, (folder / MODEL_FILE).stat().st_size / 1e6
    architecture = manifest.architecture
    sizes = "".join(
        f", {label} {value}" for label, value in (("depth", architecture.depth), ("width", architecture.width)) if value
    )
    lines = [
        f"wrote {folder}: {architecture.name}{sizes}, {manifest.precision}, {size:.1f} MB",
        f"largest error against torch in float64: {parity.largest_error:.3g} (tolerance {parity.tolerance:g}; "
        f"{parity.num_observations} random observations in batches of {', '.join(map(str, parity.batch_sizes))})",
    ]
    if parity.share_at_bounds > 0.9 and manifest.outputs == Outputs.ACTION:
        lines.append(
            f"warning: {parity.share_at_bounds:.0%} of the actions compared lie at their bounds, where errors hide; "
            "export with --outputs distribution, whose mean is compared too"
        )
    if (success := manifest.success) is not None:
        change = 100 * (success.exported - success.fp32)
        lines.append(
            f"success in {success.environment} over {success.num_episodes} episodes: {success.exported:.1%}, fp32 "
            f"{success.fp32:.1%} ({change:+.1f} points)"
        )
    return lines


def _read_choice(kind: type[_Choice], text: str, option: str) -> _Choice:
    try:
        return kind(text)
    except ValueError:
        raise UnreadableSourceError(f"{option} {text!r}: must be one of {', '.join(kind)}") from None
