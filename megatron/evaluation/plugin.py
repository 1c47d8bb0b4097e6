"""Names the model `megatron` to lm-evaluation-harness, of which no entry point is known to look for models of others.

`pip install` puts `megatron_lm_eval.pth` beside the installed packages. Python reads it when it starts; where the programme that
starts is lm_eval, it imports this module, and anywhere else nothing. The model itself is imported when it is asked for.
"""

from __future__ import annotations

from lm_eval.api.registry import model_registry
from lm_eval.models import MODEL_MAPPING

NAME, TARGET = "megatron", "megatron.evaluation.harness:MegatronLM"

if NAME not in model_registry:
    MODEL_MAPPING[NAME] = TARGET
    model_registry.register(NAME, target=TARGET)
