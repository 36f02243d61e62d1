"""Whatever is imported first, the auto classes know the families; each order in a process of its own."""

import json
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


LOAD = """
import gated_serving
from transformers import AutoModelForCausalLM
print(type(AutoModelForCausalLM.from_pretrained({folder!r})).__name__)
"""
# Only torch, which all of them need and which knows none of them, is imported once for all.
EACH_IN_A_FORK = """
import json, os, sys, torch
for code in json.loads(sys.argv[1]):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            exec(code, {})
        except BaseException as error:
            print(repr(error))
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By what was imported first: the class of the model that the auto class gave, or an error."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    programs = json.dumps([f"{first}\n{LOAD.format(folder=str(folder))}" for first in FIRST.values()])
    result = subprocess.run(
        [sys.executable, "-c", EACH_IN_A_FORK, programs], capture_output=True, text=True, check=True
    )
    return dict(zip(FIRST, result.stdout.splitlines(), strict=True))


@pytest.mark.parametrize("first", FIRST)
def test_import_order_does_not_matter(loaded: dict[str, str], first: str) -> None:
    assert loaded[first] == "GatedQwen3ForCausalLM"


def test_importing_the_package_imports_neither_torch_nor_transformers() -> None:
    code = "import gated_serving, gated_serving.cli, sys; print({'torch', 'transformers', 'vllm'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
