"""From training to serving: gated-attention language models, and deep goal-reaching policies.

Importing this package makes transformers' ``AutoConfig``, ``AutoModel``, ``AutoModelForCausalLM`` and
``AutoTokenizer`` know the families ``gated_qwen3`` and ``gated_qwen3_moe``. The import itself is quick: the families
register when transformers' own tables load, before or after it, so neither torch nor transformers is imported here.
"""

from gated_serving._auto_classes import register_when_imported

__version__ = "0.1.0"

register_when_imported()
