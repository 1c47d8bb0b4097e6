"""Rules about experts, and about how tokens choose them."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config.plan.layers import nearest_multiples_text
from megatron.core.config.rules.rule import ConfigRuleInput, config_rule, division_problem
from megatron.core.config.settings.moe import MoEConfig
from megatron.core.config.settings.run import RunConfig


def _shared_expert_problems(run: RunConfig) -> Iterator[str]:
    """Yield problems of the settings of the shared expert."""
    moe = run.model.moe
    if moe.moe_shared_expert_intermediate_size is None:
        if "shared_experts" in (run.recompute.recompute_modules or ()):
            yield "--recompute-modules shared_experts: there is none; give --moe-shared-expert-intermediate-size"
    elif moe.moe_shared_expert_overlap and moe.moe_token_dispatcher_type == "allgather":
        yield (
            "--moe-shared-expert-overlap needs tokens that travel while it computes; choose "
            "--moe-token-dispatcher-type alltoall or flex"
        )


@config_rule("experts")
def expert_setting_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Experts are those of a decoder, and what is recomputed or sent of them is there."""
    run = s.run
    model, moe = run.model, run.model.moe
    if not moe.num_experts:
        absent = [
            name for name in run.recompute.recompute_modules or () if name in ("moe", "moe_act", "shared_experts")
        ]
        if absent:
            yield f"--recompute-modules {' '.join(absent)}: there are no experts; give --num-experts, or leave it out"
        return
    if not model.architecture.is_decoder_only:
        yield f"--num-experts {moe.num_experts}: for pretrain_gpt.py only; leave it out"
    yield from _shared_expert_problems(run)
    if moe.moe_enable_deepep and moe.moe_flex_dispatcher_backend == "alltoall":
        yield "--moe-enable-deepep contradicts --moe-flex-dispatcher-backend alltoall; leave one out"


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


@config_rule("choice-of-experts", needs_sizes=True)
def router_problems(s: ConfigRuleInput) -> Iterator[str]:
    """The router has at least as many experts as it chooses for a token, and the choice can be learned."""
    moe = s.run.model.moe
    if not moe.num_experts:
        return
    experts, topk = moe.num_experts, moe.moe_router_topk
    if not 1 <= topk <= experts:
        yield f"--moe-router-topk {topk} must be from 1 to --num-experts {experts}"
    elif (
        topk == 1
        and moe.moe_router_score_function == "softmax"
        and not moe.moe_router_pre_softmax
        and not _uses_sinkhorn(moe)
    ):
        yield (
            "--moe-router-topk 1 with softmax over the chosen scores weighs every expert 1, so that the router learns nothing; "
            "add --moe-router-pre-softmax"
        )
    if moe.moe_router_enable_expert_bias and (moe.moe_router_score_function == "softmax" or _uses_sinkhorn(moe)):
        yield "--moe-router-enable-expert-bias is for --moe-router-score-function sigmoid or sqrtsoftplus, without sinkhorn"
    if moe.moe_router_topk_scaling_factor is not None and moe.moe_router_topk_scaling_factor <= 0:
        yield f"--moe-router-topk-scaling-factor {moe.moe_router_topk_scaling_factor:g} must be above 0"
    if moe.moe_input_jitter_eps is not None and not 0 <= moe.moe_input_jitter_eps < 1:
        yield f"--moe-input-jitter-eps {moe.moe_input_jitter_eps:g} is a share of the input, from 0 to below 1"
    yield from _expert_group_problems(moe)


def _expert_group_problems(moe: MoEConfig) -> Iterator[str]:
    experts, groups, taken, topk = (
        moe.num_experts,
        moe.moe_router_num_groups,
        moe.moe_router_group_topk,
        moe.moe_router_topk,
    )
    if groups is None and taken is None:
        return
    if groups is None or taken is None:
        yield "--moe-router-num-groups and --moe-router-group-topk belong together; give both or none"
        return
    if groups < 1 or (experts or 0) % groups:
        yield f"--moe-router-num-groups {groups} does not divide --num-experts {experts}"
        return
    if not 1 <= taken <= groups:
        yield f"--moe-router-group-topk {taken} must be from 1 to --moe-router-num-groups {groups}"
        return
    if _uses_sinkhorn(moe):
        yield "--moe-router-num-groups has no meaning for sinkhorn, which looks at all experts; leave it out"
        return
    size = (experts or 0) // groups
    if topk > taken * size:
        yield f"--moe-router-topk {topk} experts are not to be had in --moe-router-group-topk {taken} groups of {size}"
        return
    if moe.moe_router_group_score == "sum" and topk % taken:
        yield (
            f"--moe-router-topk {topk} is not a multiple of --moe-router-group-topk {taken}, so that a group has no number of best "
            f"experts; choose {nearest_multiples_text(topk, taken)}, or --moe-router-group-score max"
        )
        return


@config_rule("balance-of-experts", needs_sizes=True)
def load_balancing_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Methods that balance the load of experts can be combined, and each has a coefficient."""
    moe = s.run.model.moe
    if not moe.num_experts:
        return
    kinds, weights = moe.moe_router_load_balancing_type, moe.moe_aux_loss_coeff
    if len(set(kinds)) < len(kinds):
        yield f"--moe-router-load-balancing-type {' '.join(kinds)} names a kind twice; keep one"
    if len(weights) not in (1, len(kinds)):
        yield (
            f"--moe-aux-loss-coeff has {len(weights)} weights for the {len(kinds)} kinds of --moe-router-load-balancing-type; give "
            f"one, or {len(kinds)}"
        )
    alone = [kind for kind in ("sinkhorn", "none") if kind in kinds]
    if alone and len(kinds) > 1:
        yield f"--moe-router-load-balancing-type {alone[0]} stands alone; leave out the others"
    elif alone and any(weights):
        yield f"--moe-router-load-balancing-type {alone[0]} has no loss that --moe-aux-loss-coeff could weigh; leave it out"
    if any(weight < 0 for weight in weights) or (moe.moe_z_loss_coeff or 0) < 0:
        yield "--moe-aux-loss-coeff and --moe-z-loss-coeff must not be negative, or they would drive the choice apart"


@config_rule("upcycling", needs_sizes=True)
def upcycling_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Upcycling can make these experts from the MLPs of a dense checkpoint."""
    run = s.run
    model, moe = run.model, run.model.moe
    parts = moe.moe_upcycling_granularity
    if not moe.num_experts:
        return
    if not moe.moe_use_upcycling:
        if parts != 1:
            yield f"--moe-upcycling-granularity {parts} is for --moe-use-upcycling only; add it"
        return
    if run.checkpoint.load is None and run.checkpoint.pretrained_checkpoint is None and not run.train.skip_train:
        yield "--moe-use-upcycling has no dense checkpoint to begin with; give --load or --pretrained-checkpoint"
    if parts < 1 or moe.expert_width * parts != model.ffn_hidden_size:
        yield (
            f"--moe-upcycling-granularity {parts} cuts --ffn-hidden-size {model.ffn_hidden_size} into experts of another width than "
            f"--moe-ffn-hidden-size {moe.moe_ffn_hidden_size}; their product must be the dense width"
        )
    elif moe.num_experts % parts or moe.moe_router_topk % parts:
        yield (
            f"--num-experts {moe.num_experts} and --moe-router-topk {moe.moe_router_topk} must be multiples of "
            f"--moe-upcycling-granularity {parts}, so that a token uses whole copies of the MLP"
        )
    if moe.moe_shared_expert_intermediate_size is not None:
        yield "--moe-use-upcycling has nothing to make --moe-shared-expert-intermediate-size of; leave it out"
    if moe.moe_router_topk == 1 and moe.moe_router_score_function != "softmax":
        yield (
            f"--moe-use-upcycling with --moe-router-topk 1 and --moe-router-score-function {moe.moe_router_score_function} cannot know "
            "the weight of the one expert; choose softmax, or more experts a token"
        )


def _uses_sinkhorn(moe: MoEConfig) -> bool:
    return "sinkhorn" in moe.moe_router_load_balancing_type
