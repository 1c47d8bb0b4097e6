"""What a reward model says of texts: one number for each, at its last token.

    model = RewardModel.load("runs/reward/checkpoints")        a checkpoint of finetune.py --finetune-task reward, or a folder of
    model.score(["2 + 2 = 4", "2 + 2 = 5"])                    Hugging Face's with an ...ForSequenceClassification of one label
    model.score([[{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]])

Texts end with the end of document, and conversations as the chat template ends them, as in training. A folder of Hugging Face's is scored where
transformers does: at the last id that is not its config's padding, which is the one before the end where both are one id.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.settings.parallel import ParallelConfig
from megatron.core.datasets.conversations import ConversationEncoder
from megatron.core.datasets.special_tokens import tokenize_marked_text
from megatron.core.families.hf_folder import is_hf_checkpoint
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel import collectives
from megatron.core.tokenizers.base import Tokenizer
from megatron.evaluation.likelihood import EvaluationBatchLimits, Ids, score_inputs
from megatron.training.checkpoint.inference_model import REWARD, InferenceModel, load_network

Message = Mapping[str, Any]


def encode_reward_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text with the end of document, as reward models read it: [tokens]."""
    return tokenize_marked_text(tokenizer, text, ends=True)


@lru_cache(maxsize=8)
def _hf_padding_id(folder: str) -> int | None:
    """Return the padding of a Hugging Face folder's config; None for another checkpoint, or if there is none."""
    if not is_hf_checkpoint(folder):
        return None
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    text_config = config.get("text_config")
    return (text_config if isinstance(text_config, dict) else config).get("pad_token_id")


@dataclass(frozen=True, slots=True)
class RewardModel:
    """A loaded reward model. template: of conversations, as --sft-tokenizer-prompt-format names it."""

    loaded: InferenceModel[GPTModel]
    template: str = "tokenizer"

    @staticmethod
    def load(
        path: str,
        *,
        template: str = "tokenizer",
        parallel: ParallelConfig = ParallelConfig(),
        dtype: str = "auto",
        tokenizer: Mapping[str, Any] | None = None,
        device: torch.device | None = None,
        alone: bool = False,
    ) -> RewardModel:
        """Load a checkpoint, or a Hugging Face folder, collectively over all ranks; with `alone`, whole on this rank,
        which then scores by itself. template: see the class; other arguments as in `load_network`.
        """
        loaded = load_network(
            path, REWARD, parallel=parallel, dtype=dtype, tokenizer=tokenizer, device=device, alone=alone
        )
        return RewardModel(loaded, template)

    def score(
        self, texts: Sequence[str | Sequence[Message]], *, size: EvaluationBatchLimits = EvaluationBatchLimits(32)
    ) -> list[float]:
        """Return each text's or conversation's score. Collective unless `alone`: all ranks pass the same."""
        return self.score_ids(self.encode_reward_texts(texts), size=size)

    def score_ids(
        self, inputs: Sequence[Ids], *, size: EvaluationBatchLimits = EvaluationBatchLimits(32)
    ) -> list[float]:
        """As `score`, for ids with their end. `ConfigError` if a text is longer than the network's positions."""
        longest = self.loaded.config.model.max_position_embeddings
        if too_long := [number for number, ids in enumerate(inputs) if len(ids) > longest]:
            raise ConfigError(
                f"{len(too_long)} texts (the first is number {too_long[0]}) are longer than the {longest} positions of "
                f"{self.loaded.source.where}; shorten them"
            )

        padding = _hf_padding_id(self.loaded.source.where)

        def keep_last_token_scores(numbers: Sequence[int], rows: Sequence[int], values: Tensor) -> list[float]:
            """values: [b, s], at every position."""
            ends = (
                max((place for place, one in enumerate(inputs[number]) if one != padding), default=0)
                for number in numbers
            )
            return [float(values[row, end]) for end, row in zip(ends, rows, strict=True)]

        return score_inputs(self.loaded.stages, inputs, keep_last_token_scores, size=size)

    def score_as_leader(self, inputs: Sequence[Ids]) -> list[float]:
        """As `score_ids`, called on the first rank only, while all others are in `run_as_follower`."""
        return self.score_ids(collectives.broadcast_object(list(inputs), self.loaded.mesh.world))

    def release_followers(self) -> None:
        """On the first rank: end `run_as_follower` on the others."""
        collectives.broadcast_object(None, self.loaded.mesh.world)

    def run_as_follower(self) -> None:
        """Take part in what the first rank scores, until `release_followers`."""
        while (inputs := collectives.broadcast_object(None, self.loaded.mesh.world)) is not None:
            self.score_ids(inputs)

    def encode_reward_texts(self, texts: Sequence[str | Sequence[Message]]) -> list[Ids]:
        """Return the ids of each text or conversation, with its end."""
        tokenizer = self.loaded.tokenizer
        encoder = (
            ConversationEncoder(tokenizer, self.template) if any(not isinstance(text, str) for text in texts) else None
        )
        inputs: list[Ids] = []
        for text in texts:
            if isinstance(text, str):
                inputs.append(tuple(encode_reward_text(tokenizer, text)))
                continue
            assert encoder is not None, "conversations are written by a template"
            (ids,) = encoder.encode_conversations([encoder.template.render_unlearnt(text)])
            inputs.append(tuple((ids ^ (ids >> 31)).tolist()))  # an id that is not learnt is kept as ~id
        return inputs
