"""Rules about experts."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config.rules.rule import ConfigRuleInput, config_rule, division_problem, non_default_flags
from megatron.core.config.settings.run import RunConfig


def _shared_expert_problems(run: RunConfig) -> Iterator[str]:
    """Yield problems of the settings of the shared expert."""
    moe = run.model.moe
    if moe.moe_shared_expert_intermediate_size is None:
        if given := non_default_flags(moe, ("moe_shared_expert_gate", "moe_shared_expert_overlap")):
            yield f"{', '.join(given)}: there is no shared expert; give --moe-shared-expert-intermediate-size"
        if "shared_experts" in (run.recompute.recompute_modules or ()):
            yield "--recompute-modules shared_experts: there is none; give --moe-shared-expert-intermediate-size"
    elif moe.moe_shared_expert_overlap and moe.moe_token_dispatcher_type == "allgather":
        yield (
            "--moe-shared-expert-overlap needs tokens that travel while it computes; choose "
            "--moe-token-dispatcher-type alltoall or flex"
        )


@config_rule("experts")
def expert_setting_problems(s: ConfigRuleInput) -> Iterator[str]:
    """What is said of experts has experts, and the parts it speaks of."""
    run = s.run
    model, moe = run.model, run.model.moe
    if not moe.num_experts:
        yield from _unused_expert_flags_problem(run)
        return
    if model.architecture != "gpt":
        yield f"--num-experts {moe.num_experts}: for pretrain_gpt.py only; leave it out"
    yield from _shared_expert_problems(run)
    if moe.moe_token_dispatcher_type != "flex" and (moe.moe_enable_deepep or moe.moe_flex_dispatcher_backend != "auto"):
        yield "--moe-enable-deepep, --moe-flex-dispatcher-backend: these are about --moe-token-dispatcher-type flex; choose it"
    if moe.moe_enable_deepep and moe.moe_flex_dispatcher_backend == "alltoall":
        yield "--moe-enable-deepep contradicts --moe-flex-dispatcher-backend alltoall; leave one out"
    if moe.moe_expert_capacity_factor is None:
        if given := non_default_flags(moe, ("moe_pad_expert_input_to_capacity", "moe_token_drop_policy")):
            yield f"{', '.join(given)}: experts have no capacity; give --moe-expert-capacity-factor"


def _unused_expert_flags_problem(run: RunConfig) -> Iterator[str]:
    """Yield the problem of expert flags in a network without experts."""
    moe, parallel = run.model.moe, run.parallel
    elsewhere = ("num_experts", "moe_use_upcycling", "moe_upcycling_granularity")  # rules of their own speak of these
    given = non_default_flags(moe, without=elsewhere)
    given += ["--expert-model-parallel-size"] if parallel.expert_model_parallel_size != 1 else []
    given += [
        f"--recompute-modules {module}"
        for module in run.recompute.recompute_modules or ()
        if module in ("moe", "moe_act", "shared_experts")
    ]
    if given:
        yield f"{', '.join(given)}: there are no experts; give --num-experts, or leave out"


@config_rule("experts-over-ranks", needs_sizes=True)
def expert_layout_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Experts and their widths can be divided over the ranks."""
    run, world_size = s.run, s.world_size
    moe, parallel = run.model.moe, run.parallel
    if not moe.num_experts:
        return
    ep, tp, pp = parallel.expert_model_parallel_size, parallel.tp, parallel.pp
    etp = parallel.expert_tensor_parallel_size or tp
    own = f"--expert-tensor-parallel-size {etp}" + (
        "" if parallel.expert_tensor_parallel_size else " (the tensor size)"
    )
    if moe.num_experts % ep:
        yield (
            f"--num-experts {moe.num_experts} cannot be divided over --expert-model-parallel-size {ep}; choose a size "
            "that divides the experts"
        )
    yield from division_problem("--moe-ffn-hidden-size", moe.expert_width, own, etp)
    if world_size % (etp * ep * pp):
        yield (
            f"{world_size} ranks are not a multiple of {own} x --expert-model-parallel-size {ep} x "
            f"--pipeline-model-parallel-size {pp} = {etp * ep * pp}; start a multiple of {etp * ep * pp} ranks"
        )
    shared = moe.moe_shared_expert_intermediate_size
    if shared is not None:
        yield from division_problem(
            "--moe-shared-expert-intermediate-size", shared, f"--tensor-model-parallel-size {tp}", tp
        )
