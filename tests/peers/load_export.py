"""Load what was written for Megatron with the real Megatron Core, strictly, and take one step. One process a rank.

    python load_export.py REQUEST.json      with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set

A request names folders of checkpoints (`folder`), the flags that a user gives beside `--use-checkpoint-args` (`flags`), and values
of arguments that are not of the network (`given`). For each, `FOLDER/answer.json` holds loss and gradient norm of the iteration
behind the checkpoint's, or the error.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import run_peer
import torch
import upstream_arguments
import without_gpu

from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.safe_globals import register_safe_globals

# What Megatron-LM takes from a checkpoint's arguments: always, or where its own is None. The others are the command line's.
ALWAYS = (
    "num_query_groups",
    "group_query_attention",
    "position_embedding_type",
    "add_position_embedding",
    "use_rotary_position_embeddings",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "add_bias_linear",
    "add_qkv_bias",
    "squared_relu",
    "swiglu",
    "untie_embeddings_and_output_weights",
    "normalization",
    "num_experts",
    "moe_layer_freq",
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_grouped_gemm",
    "moe_shared_expert_intermediate_size",
)
WHERE_NONE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "max_position_embeddings",
    "padded_vocab_size",
)
DEFAULTS = {**upstream_arguments.MODEL, **upstream_arguments.MOE, **upstream_arguments.MLA, **upstream_arguments.DATA}


def values_of(flags: str) -> dict[str, Any]:
    """The values that words of a command line give."""
    words, found = shlex.split(flags), {}
    while words:
        name = words.pop(0)[2:].replace("-", "_")
        values = []
        while words and not words[0].startswith("--"):
            values.append(words.pop(0))
        if not values and name.startswith("no_") and name not in DEFAULTS:
            found[name[3:]] = False
        else:
            found[name] = (
                True if not values else value(values[0]) if len(values) == 1 else [value(word) for word in values]
            )
    return found


def value(word: str) -> Any:
    """A number, a list or a text."""
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word


def arguments(common: dict[str, Any], request: dict[str, Any]) -> argparse.Namespace:
    """The namespace of a run with `--use-checkpoint-args` and the flags of a request."""
    kept = vars(common["args"])
    flags = {**request["given"], **values_of(request["flags"])}
    taken = {name: kept[name] for name in WHERE_NONE if flags.get(name) is None and kept.get(name) is not None}
    taken |= {name: kept[name] for name in ALWAYS if kept.get(name) is not None}
    args = upstream_arguments.namespace(
        {**flags, **taken},
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        iteration=common["iteration"],
    )
    args.bias_gelu_fusion = args.bias_gelu_fusion and args.add_bias_linear  # as validation has it
    args.attention_backend = run_peer.module("transformer.enums").AttnBackend.auto
    args.params_dtype = args.main_grads_dtype = args.main_params_dtype = args.exp_avg_dtype = args.exp_avg_sq_dtype = (
        torch.float32
    )
    return args


def load(folder: Path, model: torch.nn.Module) -> None:
    """Read the weights as Megatron-LM does, and refuse every key that is missing or too many."""
    network = model.module
    if (folder / "metadata.json").is_file():
        content = dist_checkpointing.load_content_metadata(str(folder)) or {}
        content["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
        found = dist_checkpointing.load(
            {"model": network.sharded_state_dict(metadata=content)}, str(folder), strict="raise_all"
        )
    else:
        rank = parallel_state.get_tensor_model_parallel_rank()
        found = torch.load(folder / f"mp_rank_{rank:02d}" / "model_optim_rng.pt", map_location="cpu", weights_only=True)
    network.load_state_dict(found["model"], strict=True)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Loss and gradient norm of the next iteration."""
    folder = Path(request["folder"])
    newest = (folder / "latest_checkpointed_iteration.txt").read_text()
    place = folder / f"iter_{int(newest):07d}"
    register_safe_globals()
    if (place / "metadata.json").is_file():
        common = dist_checkpointing.load_common_state_dict(str(place))
    else:
        common = torch.load(place / "mp_rank_00" / "model_optim_rng.pt", map_location="cpu", weights_only=True)
    args = arguments(common, request)
    torch.manual_seed(args.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    model = run_peer.build(args)
    load(place, model)
    optimizer, schedule = run_peer.optimizer_and_schedule(args, model)
    optimizer.reload_model_params()
    batches = run_peer.samples(args)
    for _ in range(common["iteration"] * args.global_batch_size // args.micro_batch_size // args.data_parallel_size):
        next(batches)
    return run_peer.train_step(args, model, optimizer, schedule, batches)


def run(requests: list[dict[str, Any]]) -> None:
    """One rank of all requests, which have one tensor size."""
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(requests[0]["given"].get("tensor_model_parallel_size", 1))
    without_gpu.keep_no_random_states()
    without_gpu.multiply_groups()
    without_gpu.do_without_transformer_engine()
    run_peer.index_samples()
    for request in requests:
        without_gpu.forget_statistics()
        try:
            found = answer(request)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the answer (torch's CheckpointException is no Exception)
            found = {"error": f"{type(error).__name__}: {error}"}
            if os.environ["WORLD_SIZE"] != "1":
                raise  # the other ranks would wait
        if torch.distributed.get_rank() == 0:
            (Path(request["folder"]) / "answer.json").write_text(json.dumps(found))
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text()))
