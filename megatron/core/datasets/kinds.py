"""Which kind of data set each network trains on, for what looks at a run's data without running it.

A kind says how a prefix is opened, what --split counts, and how samples are cut. To add one, write its class beside the others, a
function that makes its `DatasetKind` from the settings of a run, and a row here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from megatron.core.config.settings.run import RunConfig
from megatron.core.datasets.dataset_protocols import DatasetKind
from megatron.core.datasets.image_folder import make_image_folder_dataset_kind
from megatron.core.datasets.multimodal import make_image_chat_dataset_kind
from megatron.core.datasets.sentence_kinds import SENTENCE_KINDS
from megatron.core.datasets.text_kinds import make_gpt_dataset_kind
from megatron.core.tokenizers.base import Tokenizer


def dataset_kind_of_run(run: RunConfig, tokenizer: Tokenizer) -> DatasetKind:
    """Return the dataset kind that the entry script of a network reads. `ConfigError` if the tokenizer or the settings
    cannot give it.
    """
    return KINDS["vlm" if run.model.has_vision else run.model.architecture.dataset](run, tokenizer)


KINDS: Mapping[str, Callable[[RunConfig, Tokenizer], DatasetKind]] = MappingProxyType(
    {
        "gpt": lambda run, tokenizer: make_gpt_dataset_kind(
            run.data, sequence_length=run.train.seq_length, seed=run.train.seed, tokenizer=tokenizer
        ),
        **SENTENCE_KINDS,
        "vlm": make_image_chat_dataset_kind,
        "vision_classify": make_image_folder_dataset_kind,
    }
)
