"""Rules about what is sent while something is computed."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config.plan.layers import parse_pipeline_layout
from megatron.core.config.rules.rule import ConfigRuleInput, config_rule
from megatron.core.config.settings.run import RunConfig


@config_rule("overlap")
def overlap_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Overlapped communication takes place in the layout, can be overlapped, and buckets have one size."""
    run = s.run
    parallel = run.parallel
    if parallel.ddp_bucket_size is not None and parallel.ddp_num_buckets is not None:
        yield "--ddp-bucket-size and --ddp-num-buckets both set the buckets; keep one"
    if parallel.overlap_moe_expert_parallel_comm:
        yield from _dual_batch_problems(run)
    if parallel.delay_wgrad_compute:
        yield from _delayed_wgrad_problems(run)


def _delayed_wgrad_problems(run: RunConfig) -> Iterator[str]:
    """Yield problems of --delay-wgrad-compute."""
    parallel, flag = run.parallel, "--delay-wgrad-compute"
    if parallel.expert_model_parallel_size == 1:
        yield f"{flag} computes while tokens travel to the experts of other ranks; give --expert-model-parallel-size, or leave it out"
    if parallel.splits_backward:
        yield (
            f"--pipeline-schedule {parallel.pipeline_schedule} has places of its own for gradients of weights; leave {flag} out, "
            "or choose 1f1b"
        )
    if parallel.use_torch_fsdp2:
        yield f"{flag} adds to gradients when FSDP2 has summed them; leave it out, or --use-torch-fsdp2"


def _dual_batch_problems(run: RunConfig) -> Iterator[str]:
    """Yield why dual-batch overlap (forward of one microbatch beside backward of another) is impossible."""
    parallel, flag = run.parallel, "--overlap-moe-expert-parallel-comm"
    if parallel.expert_model_parallel_size == 1:
        yield f"{flag} computes while tokens travel to the experts of other ranks; give --expert-model-parallel-size, or leave it out"
    chunks = (
        len(parse_pipeline_layout(parallel.pipeline_model_parallel_layout or "")) > parallel.pp
        or parallel.num_layers_per_virtual_pipeline_stage
    )
    if parallel.pipeline_schedule != "1f1b" or chunks or (parallel.num_virtual_stages_per_pipeline_rank or 1) > 1:
        yield f"{flag} does the passes of 1F1B two by two; choose --pipeline-schedule 1f1b, without virtual stages"
    reasons = {
        "--recompute-granularity": run.recompute.recompute_granularity is not None,
        "--compile": run.compilation.compile,
        "--use-torch-fsdp2": parallel.use_torch_fsdp2,
        "what takes activations to the CPU's memory": run.offload.offloads_activations,
        "--hybrid-context-parallel": parallel.hybrid_context_parallel,
    }
    yield from [
        f"{flag} has two passes under way, and {other} serves one at a time; leave one of them out"
        for other, given in reasons.items()
        if given
    ]
