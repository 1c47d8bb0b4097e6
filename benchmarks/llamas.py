"""Peers with Llama's blocks: transformers', litgpt's and torchtitan's, which stand in the plain loop of `models.py`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING
from unittest.mock import MagicMock

import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from models import Loss, Size


def transformers_llama(size: Size) -> tuple[nn.Module, Loss]:
    """transformers' Llama, which shifts labels itself: the same work."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.gated,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        max_position_embeddings=size.length,
        use_cache=False,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    return model, lambda x, y: model(input_ids=x, labels=y).loss


def litgpt_llama(size: Size) -> tuple[nn.Module, Loss]:
    """litgpt's GPT with Llama's blocks."""
    from litgpt import GPT, Config

    config = Config(
        n_layer=size.layers,
        n_head=size.heads,
        n_embd=size.hidden,
        block_size=size.length,
        padded_vocab_size=size.vocabulary,
        vocab_size=size.vocabulary,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        intermediate_size=size.gated,
    )
    model = GPT(config)
    return model, lambda x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def torchtitan(size: Size) -> tuple[nn.Module, Loss]:
    """torchtitan's Llama of 0.2, the last whose attention trains on a CPU; its readers of data, which ask for another package, are left out."""
    sys.modules.update({name: MagicMock(__spec__=None) for name in ("datasets", "datasets.distributed")})
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    model = Transformer(
        TransformerModelArgs(
            dim=size.hidden,
            n_layers=size.layers,
            n_heads=size.heads,
            vocab_size=size.vocabulary,
            multiple_of=size.gated,
            ffn_dim_multiplier=1.0,
            max_seq_len=size.length,
            rope_theta=10000.0,
        )
    )
    model.init_weights()
    return model, lambda x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten())
