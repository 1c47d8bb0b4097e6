#!/usr/bin/env python3
"""Bytes, counted and computed: what one layer keeps for its backward pass, and what a training step sends.

    python benchmarks/bytes.py

Activations are counted by hooks on every tensor that autograd saves (bf16, dropout, one layer, each storage once) and stand
beside the formulas of "Reducing Activation Recomputation in Large Transformer Models" (Korthikanti et al., 2022, table 2).
The small rest above them (mean and deviation of the norms) is left out there. What a step sends is counted at the calls of
torch.distributed and stands beside what the mathematics of each layout asks for. Both are exact on any machine.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.core.config.plan.layers import network_layer_plans
from megatron.core.kernels.ops import linear_loss
from megatron.core.kernels.ops.mask import AttentionMaskSpec
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis
from megatron.core.parallel.rng import materialize_parameters
from megatron.core.parallel.spec import set_global_param_names
from megatron.core.tensor_parallel.cross_entropy import fused_linear_cross_entropy, vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.region import TensorParallelRegion
from megatron.core.transformer.blocks import make_layer
from megatron.core.transformer.context.forward_context import ForwardContext
from megatron.plan.simulate.recorder import StepRecorder
from megatron.training.state.step import train_step
from tests.helpers import tiny
from tests.helpers.world import Worlds

Changes = dict[str, Any]
LENGTH, BATCH, HIDDEN, HEADS = 128, 2, 128, 8
SHAPE: Changes = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "seq_length": LENGTH,
    "micro_batch_size": BATCH,
    "max_position_embeddings": LENGTH,
}
TRAINING: Changes = {
    **SHAPE,
    "num_layers": 4,
    "global_batch_size": 8,
    "clip_grad": 0.0,
    "untie_embeddings_and_output_weights": True,
    "cross_entropy_fusion_impl": "native",
}  # in blocks, what is sent depends on how many tokens' losses count
EXPERTS: Changes = {
    "num_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 256,
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
}
SELECTIVE: Changes = {"recompute_granularity": "selective"}


@dataclass(frozen=True)
class Case:
    """A row of the first table. formula: bytes over s * b * h."""

    name: str
    tensor: int
    changes: Changes
    formula: Callable[[float], float]


def cases(t: int) -> list[Case]:
    """The rows of the paper's table for t tensor ranks; the argument of a formula is 5 * a * s / h."""
    cut = {"sequence_parallel": True}
    rows = [
        Case("selective recomputation", t, SELECTIVE, lambda core: 10 + 24 / t),
        Case("attention kept", t, {}, lambda core: 10 + (24 + core) / t),
    ]
    if t > 1:
        rows += [
            Case("sequence parallel, selective", t, cut | SELECTIVE, lambda core: 34 / t),
            Case("sequence parallel, attention kept", t, cut, lambda core: (34 + core) / t),
        ]
    return rows


def kept_here(changes: Changes) -> int:
    """On every rank: bytes that one layer keeps."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    run = tiny.run_of(
        tiny.config(ranks, **{**SHAPE, **dropout, "bf16": True, "tensor_model_parallel_size": ranks, **changes})
    )
    layer = make_layer(network_layer_plans(run.config.model)[0], run.layer_build_context)
    set_global_param_names(layer)
    materialize_parameters(layer, run.mesh, 1)
    parameters_memory = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    storages: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    x = torch.randn(
        run.layer_build_context.tp_region.local_sequence_length(LENGTH),
        BATCH,
        HIDDEN,
        dtype=torch.bfloat16,
        requires_grad=True,
    )
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x, ForwardContext(AttentionMaskSpec()))
    return sum(
        tensor.untyped_storage().nbytes() for place, tensor in storages.items() if place not in parameters_memory
    )


def sent_here(changes: Changes) -> dict[str, int]:
    """On every rank: elements that one step brings to the calls of each axis."""
    run = tiny.run_of(tiny.config(dist.get_world_size(), **{**TRAINING, **changes}))
    trainer = tiny.trainer_of(run)
    names = {
        axis.group: name
        for name in ("pp_backward", "pp", "dp_cp", "tp")
        if (axis := run.mesh.axis(name)).group is not None
    }
    sent: Counter[str] = Counter()

    # Two ranks that share experts may be those that share gradients: then the calls tell them apart.
    cut = "ep" if "num_experts" in changes else ""

    def counted(call: Callable[..., Any], place: int, name: str = "") -> Callable[..., Any]:
        def through(*tensors: Any, **options: Any) -> Any:
            if tensors[place].numel() > 8 and options.get("group") in names:
                sent[name or names[options["group"]]] += tensors[place].numel()
            return call(*tensors, **options)

        return through

    with (
        patch.object(dist, "all_reduce", counted(dist.all_reduce, 0)),
        patch.object(dist, "isend", counted(dist.isend, 0)),
        patch.object(dist, "all_to_all_single", counted(dist.all_to_all_single, 1, cut)),
        patch.object(collectives, "_gather_single", counted(collectives._gather_single, 0, cut)),
        patch.object(collectives, "_scatter_single", counted(collectives._scatter_single, 1, cut)),
    ):
        train_step(trainer, tiny.short_run_batches(run, 0))
    return dict(sent) | {
        "parameters": sum(parameter.numel() for stage in trainer.stages for parameter in stage.parameters())
    }


def expected(changes: Changes, weights: int) -> dict[str, int]:
    """Elements of one step by the mathematics. own: parameters of a rank.

    A layer is entered and left twice, and each is a sum over the tensor ranks of s * b * h, once forward and once backward;
    with sequence parallelism a sum is a gather and a scatter of the same size together, and the two inputs are gathered once
    more for the gradients of the weights; what it leaves whole is summed once. The embedding and the head add one each, the
    loss 3 numbers a token. A message between stages counts where it is sent.
    """
    t, p = changes.get("tensor_model_parallel_size", 1), changes.get("pipeline_model_parallel_size", 1)
    d, cut = changes.pop("dp", 1), changes.get("sequence_parallel", False)
    passes, layers, hidden = (
        TRAINING["global_batch_size"] // BATCH // d,
        TRAINING["num_layers"] // p,
        LENGTH * BATCH * HIDDEN,
    )
    volumes: dict[str, int] = {}
    if t > 1:
        sums = (8 + 2) * layers + 5 if cut else 4 * layers + 2
        whole = layers * (2 * 2 + 2) * HIDDEN + 2 * HIDDEN + LENGTH * HIDDEN  # norms, biases after a sum, positions
        volumes["tp"] = passes * (sums * hidden + 3 * LENGTH * BATCH) + (whole if cut else 0)
    if p > 1:
        volumes["pp"] = passes * hidden
    if d > 1:
        volumes["dp_cp"] = weights * (2 if changes.get("use_distributed_optimizer") else 1)
    return volumes


def expected_of_experts(dispatcher: str, ranks: int) -> int:
    """Elements that all ranks together bring to one step's calls for their experts.

    A row is a choice of a token: it goes to its expert and comes back, and so does its gradient; its weight and the weight's
    gradient go along, and the ranks tell each other how many rows go to each expert. Where all ranks see all tokens, these
    are gathered and their outputs summed, and both once more for the gradients; the choices themselves are gathered too.
    """
    experts, choices = EXPERTS["num_experts"], EXPERTS["moe_router_topk"]
    tokens, layers = LENGTH * TRAINING["global_batch_size"], TRAINING["num_layers"]
    if dispatcher == "alltoall":
        passes = TRAINING["global_batch_size"] // BATCH  # of all ranks
        return layers * (tokens * choices * (4 * HIDDEN + 2) + passes * ranks * experts)
    return layers * tokens * ranks * (4 * HIDDEN + 3 * choices)


def held_by_loss(kernel: str) -> int:
    """The most bytes that loss and gradients of a batch hold at once, beside states and words."""
    tokens, width, words = 4096, 64, 16384
    x, weight = torch.randn(tokens, 1, width, requires_grad=True), torch.randn(words, width, requires_grad=True)
    targets, alone = torch.zeros(tokens, 1, dtype=torch.long), Axis("tp")
    recorder = StepRecorder({})
    for tensor in (x, weight, targets):
        recorder.memory.track(tensor)
    before = recorder.memory.live
    with recorder:
        if kernel == "native":
            losses = vocab_parallel_cross_entropy(F.linear(x, weight), targets, alone, words)
        else:
            losses = fused_linear_cross_entropy(
                linear_loss.blockwise_linear_cross_entropy,
                x,
                weight,
                None,
                targets,
                region=TensorParallelRegion(alone),
                true_vocab_size=words,
            )
        losses.mean().backward()
    return recorder.memory.peak - before


def main() -> None:
    """Print the tables."""
    worlds = Worlds()
    core = 5 * HEADS * LENGTH / HIDDEN
    print(f"activations of one layer in bytes over s*b*h, s={LENGTH} b={BATCH} h={HIDDEN} a={HEADS}, 5as/h={core:g}")
    for t in (1, 2, 4):
        for case in cases(t):
            counted = max(worlds(t).run(kept_here, case.changes) if t > 1 else [kept_here(case.changes)])
            share, formula = counted / (LENGTH * BATCH * HIDDEN), case.formula(core)
            print(f"  tp={t} {case.name:36} counted {share:8.3f}   formula {formula:8.3f}   {share / formula:6.1%}")
    print(
        "MB that loss and gradients of 4,096 tokens x 64 x 16,384 words hold at most, in fp32; the logits alone are 268"
    )
    for kernel in ("native", "linear"):
        print(f"  {kernel:36} {held_by_loss(kernel) / 1e6:8.1f}")
    print("elements that the first rank brings to one step's calls")
    for words in (
        {"tensor_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"dp": 2},
        {"dp": 2, "use_distributed_optimizer": True},
        {"pipeline_model_parallel_size": 2},
    ):
        changes = dict(words)
        plain = {name: value for name, value in changes.items() if name != "dp"}
        counted, last = worlds(2).run(partial(sent_here, plain))
        if "pp_backward" in last:
            assert counted["pp"] == last["pp_backward"], "gradients of messages are as large as the messages"
        theory = expected(changes, counted.pop("parameters"))
        for axis in sorted(counted.keys() | theory.keys()):
            measured, computed = counted.get(axis, 0), theory.get(axis, 0)
            print(
                f"  {' '.join(f'{k}={v}' for k, v in words.items()):64} {axis:12} counted {measured:10}   theory {computed:10}   "
                f"{measured / max(computed, 1):6.1%}"
            )
    print("elements that two ranks bring to one step's calls for their experts, each token choosing 2 of 8")
    for dispatcher in ("alltoall", "allgather"):
        measured = sum(
            row["ep"] for row in worlds(2).run(sent_here, {**EXPERTS, "moe_token_dispatcher_type": dispatcher})
        )
        computed = expected_of_experts(dispatcher, 2)
        print(f"  {dispatcher:77} counted {measured:10}   theory {computed:10}   {measured / computed:6.1%}")


if __name__ == "__main__":
    main()
