"""What layers that are recorded as CUDA graphs do not go with."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config.plan.layers import network_layer_plans
from megatron.core.config.rules.rule import ConfigRuleInput, config_rule
from megatron.core.config.settings.run import RunConfig


@config_rule("cuda-graphs")
def cuda_graph_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Layers captured as CUDA graphs do the same work in every step, and never wait for the host."""
    run = s.run
    config = run.graphs
    if config.cuda_graph_impl == "none":
        return
    for why in (*_cuda_graph_obstacles(run), *_cuda_graph_dropout_obstacles(run)):
        yield f"--cuda-graph-impl local: {why}"
    if config.cuda_graph_warmup_steps < 1:
        yield (
            f"--cuda-graph-warmup-steps {config.cuda_graph_warmup_steps}: libraries make their plans in a step that is not recorded; "
            "give at least 1"
        )
    if (
        config.captured_modules == ("mlp",)
        and run.model.num_layers
        and all(plan.mlp != "dense" for plan in network_layer_plans(run.model))
    ):
        yield "--cuda-graph-modules mlp: no layer has an MLP without experts, whose rows are known only as they are computed; choose attn"


def _cuda_graph_obstacles(run: RunConfig) -> Iterator[str]:
    """Yield for each setting that CUDA graphs exclude the reason and what to leave out."""
    parallel, model = run.parallel, run.model
    backend = model.attention_backend
    packages = backend in ("varlen", "flash_attn_2", "flash_attn_3", "transformer_engine") or (
        backend,
        model.kernels.transformer_impl,
    ) == ("auto", "transformer_engine")
    reasons = {
        "what is recomputed draws on states of the host; leave out --recompute-granularity": run.recompute.recompute_granularity
        is not None,
        "layers are compiled or recorded; leave out --compile": run.compilation.compile,
        "copies to the CPU's memory wait for the host; leave out activation offloading": run.offload.offloads_activations,
        "scales of 8 and 4 bits are kept outside of the layers; leave out --fp8-format and --fp4-format": run.precision.low.recipe_name
        != "",
        "FSDP2 gathers weights into other memory each time; leave out --use-torch-fsdp2": parallel.use_torch_fsdp2,
        "context ranks talk inside of attention; leave out --context-parallel-size": parallel.context_parallel_size > 1,
        "sequences of changing lengths have no one recording; leave out --hybrid-context-parallel": parallel.hybrid_context_parallel,
        "pieces travel between the products of a layer; leave out --tp-comm-overlap": parallel.tp_comm_overlap,
        "gradients of weights wait; choose --pipeline-schedule 1f1b or gpipe, without --delay-wgrad-compute": parallel.defers_weight_gradients,
        "two passes at once would use the same memory; leave out --overlap-moe-expert-parallel-comm": parallel.overlap_moe_expert_parallel_comm,
        "scores are watched from outside of the layers; leave out --qk-clip": model.qk_clip,
        "a layer that serves several depths gets its gradient at once; leave out --mtp-use-repeated-layer": model.mtp.mtp_use_repeated_layer,
        "halves that are summed and normed by one kernel cannot be recorded apart; leave out --kernel residual_norm": model.kernels.requested_kernels.get(
            "residual_norm", "apart"
        )
        != "apart"
        and (len(run.graphs.captured_modules) == 1 or bool(model.moe.num_experts)),
        "a library of kernels asks how many documents there are; choose --attention-backend fused": packages
        and run.data.separates_documents,
    }
    yield from (reason for reason, holds in reasons.items() if holds)


def _cuda_graph_dropout_obstacles(run: RunConfig) -> Iterator[str]:
    """Yield which dropouts use random streams that the host switches, which CUDA graphs cannot capture."""
    if run.model.attention_dropout > 0:
        yield f"--attention-dropout {run.model.attention_dropout:g} has a random stream of its own; give --attention-dropout 0"
    if run.model.hidden_dropout > 0 and run.parallel.sequence_parallel:
        yield (
            f"--hidden-dropout {run.model.hidden_dropout:g} has a random stream of its own under --sequence-parallel; "
            "give --hidden-dropout 0"
        )
