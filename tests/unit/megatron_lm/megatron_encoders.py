"""Old checkpoints of Megatron's with a BERT or a T5, written row by row from the description of the format.

The network is given as whole tensors under our names. What is written has Megatron's names of an age, its order of rows,
a padded vocabulary, and layers that count from zero on every pipeline stage.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.unit.megatron_lm.megatron_files import nested

PADDED = 24  # rows of the vocabulary

# Ages: the first, with `transformer` and `attention`; and the last before Core, with `norm` for `layernorm`.
FIRST = {"encoder": "language_model.transformer", "attention": "attention", "norm": "layernorm"}
LAST = {"encoder": "language_model.encoder", "attention": "self_attention", "norm": "norm"}
LAYER = {
    "input_layernorm": "input_{norm}",
    "self_attention.linear_qkv": "{attention}.query_key_value",
    "self_attention.linear_proj": "{attention}.dense",
    "pre_mlp_layernorm": "post_attention_{norm}",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
}
DECODER = {
    **LAYER,
    "pre_cross_attn_layernorm": "post_attention_{norm}",
    "cross_attention.linear_q": "inter_attention.query",
    "cross_attention.linear_kv": "inter_attention.key_value",
    "cross_attention.linear_proj": "inter_attention.dense",
    "pre_mlp_layernorm": "post_inter_attention_{norm}",
}
REST = {
    "embedding.": "language_model.embedding.",
    "encoder.final_layernorm.": "{encoder}.final_{norm}.",
    "decoder.final_layernorm.": "language_model.decoder.final_{norm}.",
    "pooler.": "language_model.pooler.",
    "output_layer.bias": "lm_head.bias",
    "lm_head.layer_norm.": "lm_head.{norm}.",
    "lm_head.dense.": "lm_head.dense.",
    "binary_head.": "binary_head.",
}
CUT = re.compile(r"(word_embeddings|linear_qkv|linear_kv|linear_q|linear_fc1|output_layer)\.")  # rows; columns:
CUT_COLUMNS = re.compile(r"(linear_proj|linear_fc2)\.weight$")


def their_name(name: str, age: Mapping[str, str], first: int) -> str:
    """Megatron's name. first: number of the stage's first layer."""
    found = re.fullmatch(r"(encoder|decoder)\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    if found:
        stack = age["encoder"] if found[1] == "encoder" else "language_model.decoder"
        words = (LAYER if found[1] == "encoder" else DECODER)[found[3]]
        return f"{stack}.layers.{int(found[2]) - first}.{words}.{found[4]}".format(**age)
    (start,) = [start for start in REST if name.startswith(start)]
    return f"{REST[start]}{name.removeprefix(start)}".format(**age)


def order(version: float, parts: int, heads: range, size: int) -> list[tuple[int, int, int]]:
    """(part, head, element) of each row of a fused matrix, on the rank that has these heads."""
    if version == 0:
        return [(part, head, e) for part in range(parts) for head in heads for e in range(size)]
    if version == 1:
        return [(part, head, e) for head in heads for e in range(size) for part in range(parts)]
    return [(part, head, e) for head in heads for part in range(parts) for e in range(size)]


def share(name: str, whole: Tensor, *, version: float, heads: int, rank: int, ranks: int) -> Tensor:
    """What a tensor rank holds."""
    if name.startswith(("embedding.word", "output_layer")):
        whole = torch.cat([whole, torch.full((PADDED - whole.shape[0], *whole.shape[1:]), -7.0, dtype=whole.dtype)])
    fused = 3 if "linear_qkv" in name else 2 if "linear_kv" in name else 0
    if fused:
        size = whole.shape[0] // (fused * heads)
        mine = range(rank * heads // ranks, (rank + 1) * heads // ranks)
        return torch.stack(
            [whole[(part * heads + head) * size + e] for part, head, e in order(version, fused, mine, size)]
        )
    if CUT.search(name):
        return whole.chunk(ranks)[rank].clone()
    return (whole.chunk(ranks, dim=1)[rank] if CUT_COLUMNS.search(name) else whole).clone()


def write(
    folder: Path,
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    *,
    age: Mapping[str, str],
    version: float,
    tp: int = 1,
    pp: int = 1,
    arguments: bool = True,
) -> Path:
    """Save whole tensors as `mp_rank_...` folders. pp: for an encoder alone."""
    layers = int(settings["num_layers"]) // pp
    for t in range(tp):
        for p in range(pp):
            state = {}
            for name, whole in tensors.items():
                found = re.match(r"encoder\.layers\.(\d+)\.", name)
                stage = int(found[1]) // layers if found else 0 if name.startswith("embedding.") else pp - 1
                if pp == 1 or stage == p:
                    part = share(name, whole, version=version, heads=settings["num_attention_heads"], rank=t, ranks=tp)
                    state[their_name(name, age, p * layers)] = part
            if pp > 1 and p == pp - 1:
                words = tensors["embedding.word_embeddings.weight"]
                state["word_embeddings_for_head.weight"] = share(
                    "embedding.word", words, version=version, heads=1, rank=t, ranks=tp
                )
            content: dict[str, Any] = {"iteration": 7, "model": nested(state) if version < 2 else state}
            if version:
                content["checkpoint_version"] = version
            if arguments:
                content["args"] = argparse.Namespace(
                    **settings,
                    padded_vocab_size=PADDED,
                    tensor_model_parallel_size=tp,
                    pipeline_model_parallel_size=pp,
                    consumed_train_samples=0,
                )
            place = folder / (f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else ""))
            place.mkdir(parents=True)
            torch.save(content, place / "model_optim_rng.pt")
    return folder
