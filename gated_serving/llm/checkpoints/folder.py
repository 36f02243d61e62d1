"""From what the user names to a folder on disk, and its config.json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from gated_serving.llm.checkpoints.errors import BrokenConfig, CheckpointNotFound

SHIPPED_MODELS = Path(__file__).parent.parent / "pretrained"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PATTERNS = ["*.json", "*.safetensors", "*.bin", "*.txt", "*.model", "*.jinja"]


def find_folder(model: str | Path, *, download: bool = False) -> Path:
    """The folder that a path, the name of a shipped model or a Hugging Face repository id means.

    Args:
        model: A folder, a shipped model's name, or ``owner/name``.
        download: Whether to fetch a repository that is not in the local cache.

    Raises:
        CheckpointNotFound: Neither a folder nor a repository at hand.
    """
    folder = Path(model)
    try:
        if folder.is_dir():
            return folder
    except OSError as error:  # such as a name that is too long
        raise CheckpointNotFound(f"{folder}: no such folder ({error.strerror})") from error
    if str(model) in shipped_models():
        return SHIPPED_MODELS / model
    if folder.is_file():
        raise CheckpointNotFound(f"{folder}: a file; name the checkpoint's folder, {folder.parent}")
    if not _REPOSITORY.fullmatch(str(model)):
        raise CheckpointNotFound(f"{folder}: no such folder")
    return _find_repository(str(model), download=download)


def shipped_models() -> list[str]:
    """Names of the models that come with the package."""
    return sorted(path.parent.name for path in SHIPPED_MODELS.glob("*/config.json"))


def _find_repository(repository: str, *, download: bool) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ModuleNotFoundError as error:
        raise CheckpointNotFound(
            f"{repository}: no such folder; for a repository on the hub: pip install huggingface-hub"
        ) from error
    try:
        return Path(snapshot_download(repository, allow_patterns=_PATTERNS, local_files_only=not download))
    except LocalEntryNotFoundError as error:
        state = (
            "the hub could not be reached"
            if download
            else f"no such repository in the hub's local cache (fetch it with: hf download {repository})"
        )
        raise CheckpointNotFound(f"{repository}: no such folder, and {state}") from error
    except (HfHubHTTPError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointNotFound(f"{repository}: no such folder, and the hub does not give it: {reason}") from error


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder.

    Raises:
        BrokenConfig: It is absent, not a JSON object, or the folder holds a LoRA adapter instead of a model.
    """
    path = folder / "config.json"
    if not path.is_file():
        if (folder / "adapter_config.json").is_file():
            raise BrokenConfig(
                f"{folder}: a LoRA adapter, not a model; serve its base model with --enable-lora and --lora-modules, "
                "or merge the adapter into the base model first"
            )
        raise BrokenConfig(f"{folder}: no config.json; is this a Hugging Face checkpoint folder?")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenConfig(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(config, dict):
        raise BrokenConfig(f"{path}: holds a {type(config).__name__}, expected an object")
    return config
