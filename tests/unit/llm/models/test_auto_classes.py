"""Whatever is imported first, the auto classes know the families; each order in a process of its own."""

import subprocess
import sys

import pytest
from tiny_models import tiny_model

FIRST = {
    "the package": "import gated_serving",
    "a config": "from gated_serving.llm.models import GatedQwen3Config",
    "the dense models": "import gated_serving.llm.models.dense",
    "the experts' models": "import gated_serving.llm.models.moe",
    "transformers": "import transformers; transformers.AutoConfig.for_model('qwen3')",
    "Qwen3": "import gated_serving; import transformers.models.qwen3.modeling_qwen3",
}


@pytest.mark.parametrize("first", FIRST)
def test_import_order_does_not_matter(first: str, tmp_path) -> None:
    tiny_model().save_pretrained(tmp_path)
    code = f"""
{FIRST[first]}
import gated_serving
from transformers import AutoModelForCausalLM
print(type(AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})).__name__)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "GatedQwen3ForCausalLM", result.stderr


def test_importing_the_package_imports_neither_torch_nor_transformers() -> None:
    code = "import gated_serving, gated_serving.cli, sys; print({'torch', 'transformers', 'vllm'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
