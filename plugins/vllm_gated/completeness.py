"""Loading a gated checkpoint whole: every parameter from the checkpoint, and nothing in the checkpoint left over.

vLLM itself leaves a linear layer's weight uninitialised when its tensor is missing (it exempts such layers from its
own check), and drops a bias that the model has no place for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import PPMissingLayer

WeightsLoader = Callable[[Iterable[tuple[str, Tensor]]], set[str]]

_EXPERTS = ".mlp.experts."


def load_completely(model: nn.Module, load: WeightsLoader, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
    """Loads ``weights`` by ``load`` and checks that they are the model's, no more and no less.

    Args:
        model: A gated causal language model as vLLM builds it, with ``config``, ``quant_config`` and
            ``packed_modules_mapping``.
        load: vLLM's own loading.
        weights: Names and tensors of the checkpoint.

    Returns:
        What ``load`` returns.

    Raises:
        ValueError: A tensor is missing, has the wrong number of rows, is a bias that has no place in the model, or
            one expert too many; the message names it.
    """
    expected = expected_tensors(model)
    seen: set[str] = set()
    loaded = load(_checked(model, expected, seen, weights))
    if missing := _missing(model, expected, seen):
        raise ValueError(
            f"The checkpoint lacks {len(missing)} tensors that its config.json asks for: {', '.join(missing[:5])}"
            f"{', ...' if len(missing) > 5 else ''}. Either config.json is not this checkpoint's, or a file is missing."
        )
    return loaded


def expected_tensors(model: nn.Module) -> set[str]:
    """Names of the tensors that a checkpoint must have for this pipeline rank's part of the model, experts aside."""
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping")  # noqa: B009  # set by vLLM's classes
    names: set[str] = set()
    for name, _ in model.named_parameters():
        module_path, _, parameter = name.rpartition(".")
        parent, _, module = module_path.rpartition(".")
        if _EXPERTS in f"{name}.":
            continue
        names.update(f"{parent}.{part}.{parameter}" for part in packed.get(module, [module]) if parent)
        if not parent:
            names.add(name)
    return names - {"lm_head.weight"} if getattr(model, "config").tie_word_embeddings else names  # noqa: B009


def _checked(
    model: nn.Module, expected: set[str], seen: set[str], weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    num_rows = _num_attention_rows(model)
    num_experts = getattr(getattr(model, "config"), "num_experts", None)  # noqa: B009
    for name, tensor in weights:
        if name in seen:
            raise ValueError(
                f"{name}, shape {list(tensor.shape)}: the checkpoint has this tensor twice, in different files; remove "
                "the weight files that are not its own"
            )
        seen.add(name)
        if name.endswith(".bias") and name not in expected and _is_local(model, name) and bool(tensor.any()):
            raise ValueError(
                f"{name}, shape {list(tensor.shape)}: the checkpoint has a bias where config.json asks for none; "
                "check attention_bias (qkv_bias in the released format) and gate_bias"
            )
        expert = name.partition(_EXPERTS)[2].partition(".")[0]
        if num_experts is not None and expert.isdecimal() and int(expert) >= num_experts:
            raise ValueError(
                f"{name}, shape {list(tensor.shape)}: config.json asks for {num_experts} experts, expected no such "
                "tensor; check num_experts"
            )
        projection = ".".join(name.split(".")[-3:-1])
        rows = num_rows.get(projection, tensor.shape[:1].numel())
        if tensor.shape[:1].numel() != rows:
            raise ValueError(
                f"{name}, shape {list(tensor.shape)}: config.json asks for {rows} rows, expected shape "
                f"{[rows, *tensor.shape[1:]]}; check the gate's fields and the numbers of heads"
            )
        yield name, tensor


def _num_attention_rows(model: nn.Module) -> dict[str, int]:
    """Rows of the attention's projections in the checkpoint; empty for a quantised model, which packs them."""
    if getattr(model, "quant_config") is not None:  # noqa: B009
        return {}
    config: Any = getattr(model, "config")  # noqa: B009
    gate, shape = config.gate, config.attention_shape
    num_kv_rows = shape.num_kv_heads * shape.head_dim
    rows = {"q_proj": gate.num_query_rows(shape), "k_proj": num_kv_rows, "v_proj": num_kv_rows}
    if not gate.is_packed:
        rows["g_proj"] = gate.num_gate_rows(shape)
    return {f"self_attn.{name}": count for name, count in rows.items()}


def _is_local(model: nn.Module, name: str) -> bool:
    """Whether the tensor belongs to a layer of this pipeline rank."""
    module = model
    for part in name.split("."):
        children = dict(module.named_children())
        if part not in children:
            return True
        module = children[part]
        if isinstance(module, PPMissingLayer):
            return False
    return True


def _missing(model: nn.Module, expected: set[str], seen: set[str]) -> list[str]:
    if getattr(model, "quant_config") is None:  # noqa: B009
        return sorted(expected - seen) + _missing_experts(model, seen)
    # A quantised layer's tensors depend on the method: it is enough that each layer has some.
    seen_modules = {name.rpartition(".")[0] for name in seen}
    # The scales of a quantised key/value cache need not be in the checkpoint.
    expected_modules = {name.rpartition(".")[0] for name in expected} - _attention_cores(model)
    return sorted(expected_modules - seen_modules) + _missing_experts(model, seen)


def _attention_cores(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, AttentionLayerBase)}


def _missing_experts(model: nn.Module, seen: set[str]) -> list[str]:
    config: Any = getattr(model, "config")  # noqa: B009
    layers = [name.removesuffix("experts") for name, _ in model.named_modules() if name.endswith(".mlp.experts")]
    if not layers or _skips_remote_experts(model):
        return []
    seen_modules = {name.rpartition(".")[0] for name in seen if _EXPERTS in name}
    missing: list[str] = []
    for layer in layers:
        if f"{layer}experts.gate_up_proj" in seen and f"{layer}experts.down_proj" in seen:
            continue
        missing.extend(
            path
            for expert in range(config.num_experts)
            for projection in ("gate_proj", "up_proj", "down_proj")
            if (path := f"{layer}experts.{expert}.{projection}") not in seen_modules
        )
    return missing


def _skips_remote_experts(model: nn.Module) -> bool:
    parallel_config = getattr(model, "parallel_config", None)
    return bool(getattr(parallel_config, "enable_expert_parallel", False))
