"""vLLM plugin for gated-attention models.

Imports nothing but the standard library, so that it can always refuse what it cannot serve.
"""

import logging


def register() -> None:
    """Called by vLLM in each of its processes, possibly more than once.

    Never raises: vLLM would then either stop serving every model, or go on without the plugin and serve gated models
    wrong. Whatever fails instead makes vLLM refuse gated models, and them only.
    """
    try:
        from vllm_gated.installation import install

        install()
    except Exception as error:
        logging.getLogger(__name__).exception("vllm_gated cannot work here; gated models will be refused")
        from vllm_gated.refusal import refuse_gated_models

        refuse_gated_models(f"{type(error).__name__}: {error}")
