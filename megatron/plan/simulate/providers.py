"""What the entry scripts give to a trainer, by architecture: the function that builds a stage, and the forward step."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.training.launch.entry_scripts import make_entry_scripts_importable
from megatron.training.state.trainer import ForwardStep, ModelProvider

make_entry_scripts_importable()
import pretrain_bert
import pretrain_gpt
import pretrain_t5
import pretrain_vision_classify

_SCRIPTS = {"gpt": pretrain_gpt, "bert": pretrain_bert, "t5": pretrain_t5, "vit": pretrain_vision_classify}
PROVIDERS: Mapping[str, tuple[ModelProvider, ForwardStep]] = {
    architecture: (script.model_provider, script.forward_step) for architecture, script in _SCRIPTS.items()
}
