"""Which files of a folder hold the model's weights.

transformers and vLLM choose by different rules. vLLM reads every ``*.safetensors`` file of the folder, or only those
that the index names where there is one; without any it reads every ``*.bin`` file, index or not. transformers goes by
the names ``model.safetensors`` and ``pytorch_model.bin`` and prefers those to an index. A folder for which the two
would load different weights is refused, for nobody could say which of them were examined.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gated_serving.llm.checkpoints.errors import BrokenWeights

MISTRAL_FILES = "consolidated*.safetensors"
"""Files in Mistral's own naming. vLLM loads them in place of all others, wherever they lie below the folder."""

_SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
_NO_WEIGHTS = ("training_args.bin", "optimizer.bin")  # what vLLM leaves out, by the end of the name


@dataclass(frozen=True)
class WeightFiles:
    """The files that hold the weights.

    Args:
        paths: The files, in the order of their names.
        places: The index: the name of the file that holds a tensor, by the tensor's name. None without an index.
    """

    paths: tuple[Path, ...]
    places: Mapping[str, str] | None = None


def find_weight_files(folder: Path) -> WeightFiles:
    """The files that both vLLM and transformers load.

    safetensors win over .bin files.

    Raises:
        BrokenWeights: No weights, an index that is broken or names an absent file, or further weight files beside
            these that vLLM would load too.
    """
    for single in _SINGLE_FILES:
        file, index = folder / single, folder / f"{single}.index.json"
        if not file.is_file() and not index.is_file():
            continue
        chosen = _read_chosen(file, index) if index.is_file() else WeightFiles((file,))
        _refuse_strays(folder, chosen, is_filtered=index.is_file() and file.suffix == ".safetensors")
        return chosen
    raise BrokenWeights(f"{folder}: no weights found; expected {' or '.join(_SINGLE_FILES)}, or one's .index.json")


def find_mistral_files(folder: Path) -> list[Path]:
    """Files in Mistral's own naming, in the folder or below it."""
    return sorted(path for path in folder.rglob(MISTRAL_FILES) if path.is_file())


def _read_chosen(single: Path, index: Path) -> WeightFiles:
    places = _read_index(index)
    files = Counter(places.values())
    if single.is_file() and set(files) != {single.name}:
        raise BrokenWeights(
            f"{single}: {index.name} beside it names other files, such as {min(set(files) - {single.name})}; "
            "transformers would load the one and vLLM the others: remove the file or the index, whichever is stale"
        )
    for file, count in sorted(files.items()):
        if not (index.parent / file).is_file():
            first = next(name for name, place in places.items() if place == file)
            raise BrokenWeights(
                f"{index.parent / file}: the index names this file for {count} tensors, among them {first}, "
                "but it is not there; fetch it again"
            )
    return WeightFiles(tuple(index.parent / file for file in sorted(files)), places)


def _refuse_strays(folder: Path, chosen: WeightFiles, *, is_filtered: bool) -> None:
    """Refuses files that vLLM would load beside the chosen ones, or in place of them."""
    if is_filtered:  # by the index
        return
    patterns = ["*.safetensors"] if chosen.paths[0].suffix == ".safetensors" else ["*.safetensors", "*.bin"]
    for path in sorted(path for pattern in patterns for path in folder.glob(pattern)):
        is_ignored = path.name.startswith(".") or path.name.endswith(_NO_WEIGHTS) or path.match(MISTRAL_FILES)
        if path.is_file() and not is_ignored and path not in chosen.paths:
            raise BrokenWeights(
                f"{path}: a weight file beside {chosen.paths[0].name} that does not belong to it, and vLLM would load "
                "it too; move it out of the folder, or add the index that belongs to the files"
            )


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        names_are_plain = all(Path(file).name == file for file in weight_map.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise BrokenWeights(f"{path}: not an index of weights ({reason}); fetch it again") from error
    suffix = Path(path.name.removesuffix(".index.json")).suffix
    if not weight_map or not names_are_plain or not all(file.endswith(suffix) for file in weight_map.values()):
        raise BrokenWeights(f"{path}: weight_map is empty, or names files outside its folder or other than *{suffix}")
    return weight_map
