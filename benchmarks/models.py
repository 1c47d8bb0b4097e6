"""The peers of the training benchmark, each as step(x, y) -> loss: a loop around a plain PyTorch GPT, transformers' GPT-2, litgpt's and
megatron-core's, and our own training step; of sizes with Llama's blocks, those of `llamas.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import llamas
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """A GPT-2 shape, and one step's batch. gated: the width of the MLP in Llama's blocks, with a head of its own; 0: GPT-2's."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    length: int
    batch: int
    gated: int = 0

    @property
    def tokens(self) -> int:
        """Tokens in one step."""
        return self.length * self.batch

    @property
    def flops(self) -> float:
        """FLOPs of one step, attention counted over the causal half."""
        layer = 4 * self.hidden**2 + (3 * self.hidden * self.gated or 8 * self.hidden**2)
        matrices = self.layers * layer + self.vocabulary * self.hidden
        return self.tokens * (6 * matrices + 6 * self.layers * self.hidden * self.length)


SIZES = {
    "10m": Size(layers=6, hidden=256, heads=4, vocabulary=20096, length=256, batch=8),
    "tiny": Size(layers=6, hidden=384, heads=6, vocabulary=50304, length=256, batch=8),
    "llama": Size(layers=6, hidden=384, heads=6, vocabulary=32256, length=512, batch=4, gated=1024),
    "124m": Size(layers=12, hidden=768, heads=12, vocabulary=50304, length=512, batch=4),
}


class PlainBlock(nn.Module):
    """A GPT-2 block as one writes it in an afternoon."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """x: [b, s, h]."""
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, h)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """GPT-2 in plain PyTorch: SDPA and a tied head."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(size.vocabulary, size.hidden), nn.Embedding(size.length, size.hidden)
        self.blocks = nn.ModuleList(PlainBlock(size.hidden, size.heads) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.hidden), nn.Linear(size.hidden, size.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for param in self.parameters():
            if param.dim() > 1:
                nn.init.normal_(param, std=0.02)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x, y: [b, s]. Returns the mean loss."""
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), y.flatten())


Step = Callable[[Tensor, Tensor], float]
Loss = Callable[[Tensor, Tensor], Tensor]


def plain(size: Size) -> tuple[nn.Module, Loss]:
    """The plain network."""
    model = PlainGPT(size)
    return model, lambda x, y: model(x, y)


def transformers_gpt2(size: Size) -> tuple[nn.Module, Loss]:
    """transformers' GPT-2, which shifts labels itself: the same work."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=size.vocabulary,
        n_positions=size.length,
        n_embd=size.hidden,
        n_layer=size.layers,
        n_head=size.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    return model, lambda x, y: model(input_ids=x, labels=y).loss


def litgpt(size: Size) -> tuple[nn.Module, Loss]:
    """litgpt's GPT with GPT-NeoX's blocks and a tied head: rotations instead of learned positions."""
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
        bias=True,
        norm_class_name="LayerNorm",
        mlp_class_name="GptNeoxMLP",
        intermediate_size=4 * size.hidden,
    )
    model = GPT(config)
    model.lm_head.weight = model.transformer.wte.weight
    return model, lambda x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def megatron_core(size: Size) -> tuple[nn.Module, Loss]:
    """megatron-core's GPT by its local spec, the one that needs no library for GPUs. It asks for CUDA in two places."""
    import torch.distributed as dist

    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.cuda.current_device = lambda: torch.device("cpu")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    random.initialize_rng_tracker()
    random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    config = TransformerConfig(
        num_layers=size.layers,
        hidden_size=size.hidden,
        num_attention_heads=size.heads,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=size.vocabulary,
        max_sequence_length=size.length,
        share_embeddings_and_output_weights=True,
    )
    places = torch.arange(size.length).expand(size.batch, size.length)
    mask = torch.triu(torch.ones(1, 1, size.length, size.length, dtype=torch.bool), 1)
    return model, lambda x, y: model(x, places, mask, labels=y).mean()


def loop_over(make: Callable[[Size], tuple[nn.Module, Loss]], size: Size, *, compiled: bool) -> Step:
    """One step of the loop that one writes around a network."""
    model, loss_of = make(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if compiled:
        model.compile()

    def step(x: Tensor, y: Tensor) -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(x, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def ours(size: Size, *, compiled: bool) -> Step:
    """One whole training step of ours: reduce, clip, schedule and counters included."""
    from megatron.core.parallel.device import disable_malloc_trim
    from megatron.training.accelerate.compile import LayerCompiler
    from megatron.training.state.batch import Batch
    from megatron.training.state.step import train_step
    from tests.helpers import tiny

    llama = {
        "swiglu": True,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "ffn_hidden_size": size.gated,
    }
    settings = tiny.config(
        **(llama if size.gated else {"openai_gelu": True}),
        num_layers=size.layers,
        hidden_size=size.hidden,
        num_attention_heads=size.heads,
        seq_length=size.length,
        max_position_embeddings=size.length,
        micro_batch_size=size.batch,
        global_batch_size=size.batch,
        init_method_std=0.02,
        lr=1e-4,
        min_lr=1e-4,
        lr_decay_style="constant",
        padded_vocab_size=size.vocabulary,
        train_iters=1000,
    )
    trainer = tiny.trainer_of(tiny.run_of(tiny.with_vocabulary(settings, size.vocabulary)))
    if compiled:
        LayerCompiler(trainer)
    disable_malloc_trim(trainer.run.mesh.device)  # as initialize_megatron does
    mask = torch.ones(size.batch, size.length)

    def step(x: Tensor, y: Tensor) -> float:
        total, count = (
            train_step(trainer, iter((Batch(tokens=x, labels=y, loss_mask=mask),))).losses["lm loss"].tolist()
        )
        return total / count

    return step


_GPT2 = {
    "plain": partial(loop_over, plain),
    "transformers": partial(loop_over, transformers_gpt2),
    "litgpt": partial(loop_over, litgpt),
    "megatron-core": partial(loop_over, megatron_core),
    "ours": ours,
}
_LLAMA = {
    "transformers": partial(loop_over, llamas.transformers_llama),
    "litgpt": partial(loop_over, llamas.litgpt_llama),
    "torchtitan": partial(loop_over, llamas.torchtitan),
    "ours": ours,
}


def peers_of(size: Size) -> dict[str, Callable[..., Step]]:
    """Who can train a network of this shape."""
    return _LLAMA if size.gated else _GPT2
