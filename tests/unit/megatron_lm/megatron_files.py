"""Checkpoints as Megatron lays them out, written row by row from the description of its formats, and nothing of ours."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

OLD = {
    "stack": "language_model.transformer",
    "attention": "attention",
    "qkv": "attention.query_key_value",
    "proj": "attention.dense",
    "first": "input_layernorm",
    "second": "post_attention_layernorm",
    "fc1": "mlp.dense_h_to_4h",
    "fc2": "mlp.dense_4h_to_h",
    "final": "final_layernorm",
    "words": "language_model.embedding.",
}
V2 = {**OLD, "stack": "language_model.encoder", "qkv": "self_attention.query_key_value", "proj": "self_attention.dense"}
V5 = {**V2, "first": "input_norm", "second": "post_attention_norm", "final": "final_norm"}
LOCAL = {
    "stack": "decoder",
    "qkv": "self_attention.linear_qkv",
    "proj": "self_attention.linear_proj",
    "first": "input_layernorm",
    "second": "pre_mlp_layernorm",
    "fc1": "mlp.linear_fc1",
    "fc2": "mlp.linear_fc2",
    "final": "final_layernorm",
    "words": "embedding.",
}


@dataclass
class Whole:
    """A model without ranks. Every matrix by itself: nothing is fused."""

    layers: int = 4
    heads: int = 4
    groups: int = 4
    size: int = 3  # of a head
    ids: int = 10
    padded: int = 12
    gated: bool = False
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(5)
        h = self.heads * self.size
        self.tensors["words"], self.tensors["places"] = torch.randn(self.padded, h), torch.randn(6, h)
        for i in range(self.layers):
            for name, rows in (
                ("q", h),
                ("k", self.groups * self.size),
                ("v", self.groups * self.size),
                ("proj", h),
                ("up", 8),
                *((("gate", 8),) if self.gated else ()),
            ):
                self.tensors[f"{i}.{name}"], self.tensors[f"{i}.{name}.bias"] = torch.randn(rows, h), torch.randn(rows)
            self.tensors[f"{i}.down"], self.tensors[f"{i}.down.bias"] = torch.randn(h, 8), torch.randn(h)
            for norm in ("first", "second"):
                self.tensors[f"{i}.{norm}"], self.tensors[f"{i}.{norm}.bias"] = torch.randn(h), torch.randn(h)
        self.tensors["final"], self.tensors["final.bias"] = torch.randn(h), torch.randn(h)

    def ours(self) -> dict[str, Tensor]:
        """What it is under our names."""
        t = self.tensors
        found = {
            "embedding.word_embeddings.weight": t["words"][: self.ids],
            "embedding.position_embeddings.weight": t["places"],
        }
        for i in range(self.layers):
            at = f"decoder.layers.{i}."
            for ours, suffix in (("weight", ""), ("bias", ".bias")):
                fc1 = [t[f"{i}.gate{suffix}"]] if self.gated else []
                found |= {
                    f"{at}self_attention.linear_qkv.{ours}": torch.cat([t[f"{i}.{part}{suffix}"] for part in "qkv"]),
                    f"{at}self_attention.linear_proj.{ours}": t[f"{i}.proj{suffix}"],
                    f"{at}mlp.linear_fc1.{ours}": torch.cat([*fc1, t[f"{i}.up{suffix}"]]),
                    f"{at}mlp.linear_fc2.{ours}": t[f"{i}.down{suffix}"],
                    f"{at}input_layernorm.{ours}": t[f"{i}.first{suffix}"],
                    f"{at}pre_mlp_layernorm.{ours}": t[f"{i}.second{suffix}"],
                }
        return found | {"decoder.final_layernorm.weight": t["final"], "decoder.final_layernorm.bias": t["final.bias"]}

    def settings(self) -> dict[str, Any]:
        """The arguments of the run, as far as they describe the model."""
        return {
            "num_layers": self.layers,
            "hidden_size": self.heads * self.size,
            "num_attention_heads": self.heads,
            "ffn_hidden_size": 8,
            "group_query_attention": self.groups != self.heads,
            "num_query_groups": self.groups,
            "swiglu": self.gated,
            "untie_embeddings_and_output_weights": False,
        }

    def qkv_rows(self, layer: int, suffix: str, version: float, rank: int, ranks: int) -> Tensor:
        """The rows of a fused matrix on one tensor rank, one by one in the order of a version."""
        t = {part: self.tensors[f"{layer}.{part}{suffix}"] for part in "qkv"}
        heads = range(rank * self.heads // ranks, (rank + 1) * self.heads // ranks)
        groups = range(rank * self.groups // ranks, (rank + 1) * self.groups // ranks)
        each = self.heads // self.groups
        order: list[tuple[str, int, int]] = []
        if version == 0:
            order = [(part, head, e) for part in "qkv" for head in heads for e in range(self.size)]
        elif version == 1:
            order = [(part, head, e) for head in heads for e in range(self.size) for part in "qkv"]
        else:
            for group in groups:
                order += [("q", head, e) for head in range(group * each, (group + 1) * each) for e in range(self.size)]
                order += [(part, group, e) for part in "kv" for e in range(self.size)]
        return torch.stack([t[part][head * self.size + e] for part, head, e in order])

    def stage(
        self, names: dict[str, str], layers: range, *, version: float, rank: int, ranks: int, first: bool, last: bool
    ) -> dict[str, Tensor]:
        """The flat state dict of one pipeline stage on one tensor rank; its layers count from zero."""
        found: dict[str, Tensor] = {}

        def rows(tensor: Tensor) -> Tensor:
            n = tensor.shape[0] // ranks
            return tensor[rank * n : (rank + 1) * n].clone()

        t = self.tensors
        if first:
            found[f"{names['words']}word_embeddings.weight"] = rows(t["words"])
            found[f"{names['words']}position_embeddings.weight"] = t["places"].clone()
        for local, i in enumerate(layers):
            at = f"{names['stack']}.layers.{local}."
            for theirs, suffix in (("weight", ""), ("bias", ".bias")):
                found[f"{at}{names['qkv']}.{theirs}"] = self.qkv_rows(i, suffix, version, rank, ranks)
                fc1 = [rows(t[f"{i}.gate{suffix}"])] if self.gated else []
                found[f"{at}{names['fc1']}.{theirs}"] = torch.cat([*fc1, rows(t[f"{i}.up{suffix}"])])
                for norm in ("first", "second"):
                    found[f"{at}{names[norm]}.{theirs}"] = t[f"{i}.{norm}{suffix}"].clone()
            for name, ours in (("proj", "proj"), ("fc2", "down")):
                columns = t[f"{i}.{ours}"]
                n = columns.shape[1] // ranks
                found[f"{at}{names[name]}.weight"] = columns[:, rank * n : (rank + 1) * n].clone()
                found[f"{at}{names[name]}.bias"] = t[f"{i}.{ours}.bias"].clone()
        if last:
            for theirs, suffix in (("weight", ""), ("bias", ".bias")):
                found[f"{names['stack']}.{names['final']}.{theirs}"] = t[f"final{suffix}"].clone()
            if not first:
                found["word_embeddings_for_head.weight" if "language" in names["stack"] else "output_layer.weight"] = (
                    rows(t["words"])
                )
        return found

    def write(
        self,
        folder: Path,
        names: dict[str, str],
        *,
        version: float,
        tp: int = 1,
        pp: int = 1,
        vpp: int = 1,
        old_file: bool = False,
        arguments: bool = True,
    ) -> Path:
        """Save as `mp_rank_...` folders."""
        each = self.layers // (pp * vpp)
        for t in range(tp):
            for p in range(pp):
                content: dict[str, Any] = {"iteration": 7, "rng_state": [{"torch_rng_state": torch.get_rng_state()}]}
                if version:
                    content["checkpoint_version"] = version
                if arguments:
                    size = "model_parallel_size" if version < 3 else "tensor_model_parallel_size"
                    content["args"] = argparse.Namespace(
                        **self.settings(),
                        **{size: tp, "pipeline_model_parallel_size": pp},
                        padded_vocab_size=self.padded,
                        consumed_train_samples=56,
                        seq_length=6,
                    )
                for c in range(vpp):
                    at = (c * pp + p) * each
                    state = self.stage(
                        names,
                        range(at, at + each),
                        version=version,
                        rank=t,
                        ranks=tp,
                        first=at == 0,
                        last=at + each == self.layers,
                    )
                    content["model" if vpp == 1 else f"model{c}"] = nested(state) if version < 2 else state
                place = folder / (f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else ""))
                place.mkdir(parents=True)
                torch.save(content, place / "model_optim_rng.pt", _use_new_zipfile_serialization=not old_file)
        return folder


def nested(state: dict[str, Tensor]) -> dict[str, Any]:
    """The dicts in dicts of the first versions; `transformer` and `encoder` stay flat within."""
    found: dict[str, Any] = {}
    for name, tensor in state.items():
        head = name.split(".")
        depth = 2 if "transformer" in head or "encoder" in head else len(head) - 1
        place = found
        for step in head[:depth]:
            place = place.setdefault(step, {})
        place[".".join(head[depth:])] = tensor
    return found
