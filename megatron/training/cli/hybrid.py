"""What pretrain_hybrid.py asks for beside the rules of every run: flags that say which layers have a state."""

from __future__ import annotations

from typing import Any


def missing_hybrid_pattern_problems(args: Any, world_size: int) -> list[str]:
    """Why the flags of a run (args: their namespace) are not those of a hybrid, a line. Megatron's pretrain_mamba.py made every layer Mamba-2 without a pattern."""
    if (
        args.hybrid_layer_pattern is not None
        or args.hybrid_attention_ratio
        or args.hybrid_mlp_ratio
        or args.experimental_attention_variant
        or args.parallel_mamba
        or args.use_checkpoint_args
    ):
        return []
    layers = args.num_layers or 0
    pure = f" ({'M' * layers} for Mamba-2 in all of --num-layers {layers})" if 0 < layers <= 100 else ""
    return [
        f"no flag says which layers have a state: give --hybrid-layer-pattern{pure}, or --experimental-attention-variant; pretrain_gpt.py trains a "
        "GPT"
    ]
