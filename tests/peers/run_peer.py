"""Train a case with the real Megatron Core, save as Megatron-LM saves, go on, and write the losses. One process a rank.

    python run_peer.py CASE FOLDER          with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set

Only `megatron.core` is in the package; what Megatron-LM's `training` adds around it (the arguments, the common entries of a
checkpoint, its places on disk) is written here from the description of its format. It runs where the working directory and
PYTHONPATH make `megatron` NVIDIA's package and not ours.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import random
import re
import sys
import types
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import checkpoint
from torch.distributed.tensor import Shard, distribute_tensor

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import without_gpu  # noqa: E402
from releases import Schedule, fill_in, index_samples, known, let_optimizers_be_distributed, module  # noqa: E402

fill_in()
without_gpu.answer_for_cuda()

import upstream_arguments  # noqa: E402
from cases import CASES, LAST, SAVED  # noqa: E402

from megatron.core import dist_checkpointing, parallel_state, tensor_parallel  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt import gpt_layer_specs as specs  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402


def arguments(given: dict[str, Any], iteration: int) -> argparse.Namespace:
    """The namespace of a run of Megatron-LM, with values of Megatron Core's and torch's classes."""
    args = upstream_arguments.namespace(
        given, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]), iteration=iteration
    )
    args.attention_backend = getattr(module("transformer.enums"), "AttnBackend", types.SimpleNamespace(auto=None)).auto
    args.params_dtype = torch.bfloat16 if args.bf16 else torch.float
    args.main_grads_dtype = args.main_params_dtype = args.exp_avg_dtype = args.exp_avg_sq_dtype = torch.float32
    size = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = -(-(args.vocab_size + 1) // size) * size
    return args


def transformer_config(args: argparse.Namespace) -> TransformerConfig:
    """The config of Megatron Core that Megatron-LM makes of its arguments."""
    kind = module("transformer").MLATransformerConfig if args.multi_latent_attention else TransformerConfig
    values = {name: getattr(args, name) for name in kind.__dataclass_fields__ if hasattr(args, name)}
    values |= {
        "layernorm_zero_centered_gamma": args.apply_layernorm_1p,
        "layernorm_epsilon": args.norm_epsilon,
        "pipeline_dtype": args.params_dtype,
        "num_moe_experts": args.num_experts,
        "num_query_groups": args.num_query_groups if args.group_query_attention else None,
        "persist_layer_norm": False,
        "cp_comm_type": "p2p",
        "bias_activation_fusion": args.bias_swiglu_fusion if args.swiglu else args.bias_gelu_fusion,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "bias_dropout_fusion": False,
        "gated_linear_unit": args.swiglu,
    }
    if args.swiglu:
        values["activation_func"] = torch.nn.functional.silu
    if args.squared_relu or args.quick_geglu:
        from megatron.core.activations import quick_gelu, squared_relu

        values["activation_func"] = squared_relu
    if args.quick_geglu:
        values |= {"activation_func": quick_gelu, "gated_linear_unit": True}
    if args.rope_type is None:
        values.pop("rope_type", None)
    return known(kind, **values)


def build(args: argparse.Namespace) -> DistributedDataParallel:
    """The network, as `gpt_builder` of Megatron-LM makes it with --transformer-impl local."""
    config = transformer_config(args)
    if args.num_experts:
        spec = known(
            specs.get_gpt_decoder_block_spec,
            config=config,
            use_transformer_engine=False,
            normalization=args.normalization,
            qk_l2_norm=args.qk_l2_norm,
        )
    else:
        spec = known(
            specs.get_gpt_layer_local_spec,
            qk_layernorm=args.qk_layernorm,
            multi_latent_attention=args.multi_latent_attention,
            normalization=args.normalization,
            qk_l2_norm=args.qk_l2_norm,
        )
    if args.hybrid_override_pattern:
        return wrap(args, config, hybrid(args, config, spec))
    mtp = specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if args.mtp_num_layers else None
    model = known(
        GPTModel,
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        mtp_block_spec=mtp,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
    )
    return wrap(args, config, model)


def hybrid(args: argparse.Namespace, config: TransformerConfig, spec: Any) -> torch.nn.Module:
    """A hybrid network of Megatron's: attention and MLP are layers of their own. spec: of a layer that has both."""
    stack, layer = module("ssm.mamba_block"), module("transformer.transformer_layer")
    stack.TENorm = module("transformer.torch_norm").WrappedTorchNorm  # Transformer Engine's, for the norm at the end
    parts = {
        name: getattr(spec.submodules, name)
        for name in ("input_layernorm", "self_attention", "self_attn_bda", "pre_mlp_layernorm", "mlp", "mlp_bda")
    }
    halves = [{name: part for name, part in parts.items() if ("mlp" in name) == mlp} for mlp in (False, True)]
    names = spec.submodules.sharded_state_dict_keys_map
    attention, mlp = (layer.TransformerLayerSubmodules(**half, sharded_state_dict_keys_map=names) for half in halves)
    make = module("transformer.spec_utils").ModuleSpec
    made = make(
        module=stack.MambaStack,
        submodules=stack.MambaStackSubmodules(
            attention_layer=make(module=layer.TransformerLayer, submodules=attention),
            mlp_layer=make(module=module("ssm.mlp_layer").MLPLayer, submodules=mlp),
        ),
    )
    return module("models.mamba").MambaModel(
        config=config,
        mamba_stack_spec=made,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        hybrid_override_pattern=args.hybrid_override_pattern,
        position_embedding_type=args.position_embedding_type,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        parallel_output=True,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
    )


def wrap(args: argparse.Namespace, config: TransformerConfig, model: torch.nn.Module) -> DistributedDataParallel:
    """A network as its gradients are summed over ranks."""
    model = Float16Module(config, model) if args.bf16 else model
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=args.bf16, use_distributed_optimizer=args.use_distributed_optimizer
    )
    wrapped = DistributedDataParallel(config, ddp, model)
    config.finalize_model_grads_func = finalize_model_grads
    return wrapped


def optimizer_and_schedule(args: argparse.Namespace, model: DistributedDataParallel) -> tuple[Any, Any]:
    """Adam and its learning rates, in samples as Megatron-LM counts them."""
    values = {name: getattr(args, name) for name in OptimizerConfig.__dataclass_fields__ if hasattr(args, name)}
    optimizer = get_megatron_optimizer(OptimizerConfig(**values), [model])
    size = args.global_batch_size
    schedule = getattr(module("optimizer_param_scheduler"), "OptimizerParamScheduler", Schedule)(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters * size,
        lr_decay_steps=args.lr_decay_iters * size,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay,
        wd_incr_steps=args.train_iters * size,
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=False,
    )
    model.config.grad_scale_func = optimizer.scale_loss
    return optimizer, schedule


def write_tokens(prefix: Path, vocab_size: int) -> None:
    """A small pair of .bin and .idx of Megatron Core's own writer: every document counts on from a random id, with slips."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    draws = np.random.RandomState(5)
    writer = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for _ in range(60):
        steps = np.where(draws.rand(draws.randint(8, 40)) < 0.2, draws.randint(0, vocab_size), 1)
        ids = (draws.randint(0, vocab_size) + np.cumsum(steps)) % vocab_size
        writer.add_document(torch.tensor([*ids, vocab_size]), [len(ids) + 1])
    writer.finalize(f"{prefix}.idx")


def samples(args: argparse.Namespace) -> Iterator[dict[str, torch.Tensor]]:
    """Micro batches in Megatron-LM's order (--dataloader-type single), over its GPT data set."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    names = {"kind": "null", "vocab_size": args.vocab_size}
    tokenizer = types.SimpleNamespace(
        eod=args.vocab_size, pad=-1, vocab_size=args.vocab_size + 1, unique_identifiers=names
    )
    config = known(
        GPTDatasetConfig,
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=(args.data_path, None),
        split=args.split,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=True,
        mid_level_dataset_surplus=0.005,
        path_to_cache="cache",
    )
    train, _, _ = BlendedMegatronDatasetBuilder(
        GPTDataset, [args.train_iters * args.global_batch_size, 0, 0], lambda: True, config
    ).build()
    per_rank = args.global_batch_size // args.data_parallel_size
    rank = parallel_state.get_data_parallel_rank()
    for start in range(0, args.train_iters * args.global_batch_size, args.micro_batch_size * args.data_parallel_size):
        first = start + rank * args.micro_batch_size
        assert per_rank % args.micro_batch_size == 0
        rows = [train[place] for place in range(first, first + args.micro_batch_size)]
        yield {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The network itself."""
    return unwrapped(model.module) if hasattr(model, "module") else model


def forward_step(batches: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """One micro batch: the losses of its tokens, and how to sum them (two values: a sum, and a number of tokens)."""
    batch = next(batches)

    def loss_func(
        mask: torch.Tensor, losses: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        total, tokens = (losses.view(-1).float() * mask.view(-1)).sum(), mask.sum().int()
        return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}

    mask = (
        {"loss_mask": batch["loss_mask"]}
        if "loss_mask" in inspect.signature(unwrapped(model).forward).parameters
        else {}
    )
    out = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"], **mask)
    return out, partial(loss_func, batch["loss_mask"])


def train_step(args: argparse.Namespace, model: Any, optimizer: Any, schedule: Any, batches: Any) -> dict[str, float]:
    """One iteration. Returns the loss of the global batch, and the norm of its gradient."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    count = args.global_batch_size // args.micro_batch_size // args.data_parallel_size
    reduced = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches,
        model=[model],
        num_microbatches=count,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        decoder_seq_length=None,
        forward_only=False,
    )
    _, norm, _ = optimizer.step()
    rate = optimizer.param_groups[0]["lr"]
    schedule.step(increment=args.global_batch_size)
    sums = torch.stack([one["lm loss"] for one in reduced]).sum(0)
    torch.distributed.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    return {"loss": float(sums[0] / sums[1]), "grad_norm": float(norm), "lr": rate}


def random_states(args: argparse.Namespace) -> Any:
    """The entry `device_rng_state`."""
    state = [
        {
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "cuda_rng_state": torch.cuda.get_rng_state(),
            "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
        }
    ]
    if args.ckpt_format != "torch_dist":
        return state
    p, t = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    return ShardedObject(
        "rng_state",
        state,
        (args.pipeline_model_parallel_size, args.tensor_model_parallel_size),
        (p, t),
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )


def kind_of_state(whole: bool) -> str:
    """How Megatron-LM of the release shards a distributed optimizer's state. whole: with --dist-ckpt-optim-fully-reshardable."""
    if not hasattr(module("optimizer.distrib_optimizer").DistributedOptimizer, "sharded_param_state_dp_reshardable"):
        return "fully_sharded_model_space"
    return "fully_reshardable" if whole else "dp_reshardable"


def sharded_optimizer(optimizer: Any, state: dict[str, Any], meta: dict[str, Any]) -> Any:
    """The entry `optimizer` of the distributed format; releases until 0.13 were told less."""
    inner = getattr(optimizer, "chained_optimizers", [optimizer])[0].sharded_state_dict
    told = {"metadata": meta, "sharding_type": meta.get("distrib_optim_sharding_type")}
    takes = inspect.signature(inner).parameters
    name = next((name for name in told if name in takes), None)
    return optimizer.sharded_state_dict(
        state["model"] if name != "metadata" else state, **({name: told[name]} if name else {})
    )


def fsdp_state(state: dict[str, Any], network: Any, optimizer: Any, args: argparse.Namespace) -> dict[str, Any]:
    """The state of Megatron FSDP's format, which needs a GPU: values of this run, names and boxes from reading Megatron's source.

    Parameters are DTensors over the data-parallel ranks; gated matrices are two. The halves of one have rows on some ranks only there.
    """
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (args.world_size,))
    names = {parameter: name for name, parameter in network.named_parameters()}
    inner = optimizer.chained_optimizers[0] if hasattr(optimizer, "chained_optimizers") else optimizer

    def spread(name: str, tensor: torch.Tensor) -> dict[str, Any]:
        gated = args.swiglu and re.search(r"linear_fc1\.weight\d*$", name)
        parts = {f"{name}_w": tensor.chunk(2)[0], f"{name}_v": tensor.chunk(2)[1]} if gated else {name: tensor}
        return {name: distribute_tensor(part.detach().clone(), mesh, [Shard(0)]) for name, part in parts.items()}

    moments: dict[str, dict[str, Any]] = {}
    groups: dict[str, Any] = {}
    for group in inner.optimizer.param_groups:
        for parameter in group["params"]:
            name, one = f"module.module.{names[parameter]}", inner.optimizer.state[parameter]
            groups[name] = {key: value for key, value in group.items() if key != "params"} | {"step": int(one["step"])}
            for slot in ("exp_avg", "exp_avg_sq"):
                for half, tensor in spread(name, one[slot]).items():
                    moments.setdefault(half, {})[slot] = tensor
    weights = {
        key: one
        for name, value in network.state_dict().items()
        if isinstance(value, torch.Tensor)
        for key, one in spread(f"module.{name}", value).items()
    }
    rest = {name: value for name, value in state.items() if name not in ("model", "optimizer", "rng_state")}
    return {
        **rest,
        "model": weights,
        "optimizer": {"state": moments, "param_to_group_meta": groups},
        "rng_state": {"(0, 0)": [{"torch_rng_state": torch.get_rng_state()}]},
    }


def save(args: argparse.Namespace, folder: Path, model: Any, optimizer: Any, schedule: Any, iteration: int) -> None:
    """Write a checkpoint where and as Megatron-LM does."""
    place = folder / "checkpoints" / f"iter_{iteration:07d}"
    sharded = args.ckpt_format == "torch_dist"
    meta: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if args.use_distributed_optimizer:
        whole = args.dist_ckpt_optim_fully_reshardable
        meta["distrib_optim_sharding_type"] = kind_of_state(whole)
        meta |= {"distrib_optim_fully_reshardable_mem_efficient": False} if whole else {}
    meta["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    network = model.module
    state = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "model": known(network.sharded_state_dict, metadata=meta)
        if sharded
        else network.state_dict_for_save_checkpoint(),
    }
    state["optimizer"] = sharded_optimizer(optimizer, state, meta) if sharded else optimizer.state_dict()
    state |= {
        "opt_param_scheduler": schedule.state_dict(),
        "rng_state": random_states(args),
        "num_floating_point_operations_so_far": 12345,
    }
    if args.ckpt_format == "fsdp_dtensor":
        place.mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        checkpoint.save(fsdp_state(state, network, optimizer, args), checkpoint_id=place)
    elif sharded:
        place.mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        strategy = dist_checkpointing.serialization.get_default_save_sharded_strategy("torch_dist")
        del meta["dp_cp_group"]
        known(dist_checkpointing.save, state, str(place), strategy, content_metadata=meta)
    else:
        file = place / f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}" / "model_optim_rng.pt"
        file.parent.mkdir(parents=True, exist_ok=True)
        if args.use_distributed_optimizer:
            optimizer.save_parameter_state(str(file.parent / "distrib_optim.pt"))
        if parallel_state.get_data_parallel_rank() == 0:
            torch.save(state, file)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(iteration))


def run(name: str, folder: Path) -> None:
    """One rank of one case."""
    case = CASES[name]
    args = arguments(case.arguments, 0)
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
    )
    without_gpu.keep_no_random_states()
    without_gpu.multiply_groups()
    without_gpu.do_without_transformer_engine()
    index_samples()
    let_optimizers_be_distributed()
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    if torch.distributed.get_rank() == 0:
        write_tokens(folder / "tokens", args.vocab_size)
    torch.distributed.barrier()
    os.chdir(folder)
    model = build(args)
    optimizer, schedule = optimizer_and_schedule(args, model)
    batches, steps = samples(args), []
    for iteration in range(1, LAST + 1):
        steps.append({"iteration": iteration, **train_step(args, model, optimizer, schedule, batches)})
        if iteration == SAVED:
            save(arguments(case.arguments, iteration), folder, model, optimizer, schedule, iteration)
    if torch.distributed.get_rank() == 0:
        (folder / "losses.json").write_text(json.dumps(steps, indent=1))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]).resolve())
