"""Rules about experts; each function returns what is wrong and how to mend it, a line each."""

from __future__ import annotations

from dataclasses import fields

from megatron.core.config.flags import flag_name
from megatron.core.config.rules.rule import Rule, RuleInput
from megatron.core.config.settings.run import RunConfig


def _shared_expert(run: RunConfig) -> list[str]:
    """What belongs to a shared expert."""
    moe = run.model.moe
    problems = []
    if moe.moe_shared_expert_intermediate_size is None:
        given = [
            flag_name(name) for name in ("moe_shared_expert_gate", "moe_shared_expert_overlap") if getattr(moe, name)
        ]
        if given:
            problems.append(
                f"{', '.join(given)}: there is no shared expert; give --moe-shared-expert-intermediate-size"
            )
        if "shared_experts" in (run.recompute.recompute_modules or ()):
            problems.append(
                "--recompute-modules shared_experts: there is none; give --moe-shared-expert-intermediate-size"
            )
    elif moe.moe_shared_expert_overlap and moe.moe_token_dispatcher_type == "allgather":
        problems.append(
            "--moe-shared-expert-overlap needs tokens that travel while it computes; choose "
            "--moe-token-dispatcher-type alltoall or flex"
        )
    return problems


def experts(s: RuleInput) -> str:
    """What is said of experts has experts to speak of, and parts that belong together."""
    run = s.run
    model, moe, problems = run.model, run.model.moe, []
    if not moe.num_experts:
        return _flags_without_experts(run)
    if model.architecture != "gpt":
        problems.append(f"--num-experts {moe.num_experts}: for pretrain_gpt.py only; leave it out")
    problems += _shared_expert(run)
    if moe.moe_token_dispatcher_type != "flex" and (moe.moe_enable_deepep or moe.moe_flex_dispatcher_backend != "auto"):
        problems.append(
            "--moe-enable-deepep, --moe-flex-dispatcher-backend: these are about --moe-token-dispatcher-type flex; choose it"
        )
    if moe.moe_enable_deepep and moe.moe_flex_dispatcher_backend == "alltoall":
        problems.append("--moe-enable-deepep contradicts --moe-flex-dispatcher-backend alltoall; leave one out")
    if moe.moe_expert_capacity_factor is None:
        given = [
            flag_name(name)
            for name, default in (("moe_pad_expert_input_to_capacity", False), ("moe_token_drop_policy", "probs"))
            if getattr(moe, name) != default
        ]
        if given:
            problems.append(f"{', '.join(given)}: experts have no capacity; give --moe-expert-capacity-factor")
    return "\n  ".join(problems)


def _flags_without_experts(run: RunConfig) -> str:
    """What is left over when there are no experts."""
    moe, parallel = run.model.moe, run.parallel
    elsewhere = ("num_experts", "moe_use_upcycling", "moe_upcycling_granularity")  # rules of their own speak of these
    given = [
        flag_name(field.name)
        for field in fields(moe)
        if field.name not in elsewhere and getattr(moe, field.name) != field.default
    ]
    given += ["--expert-model-parallel-size"] if parallel.expert_model_parallel_size != 1 else []
    given += [
        f"--recompute-modules {module}"
        for module in run.recompute.recompute_modules or ()
        if module in ("moe", "moe_act", "shared_experts")
    ]
    return f"{', '.join(given)}: there are no experts; give --num-experts, or leave out" if given else ""


def expert_layout(s: RuleInput) -> str:
    """Experts and their widths can be divided over the ranks."""
    run, world_size = s.run, s.world_size
    moe, parallel, problems = run.model.moe, run.parallel, []
    if not moe.num_experts:
        return ""
    ep, tp, pp = parallel.expert_model_parallel_size, parallel.tp, parallel.pp
    etp = parallel.expert_tensor_parallel_size or tp
    own = f"--expert-tensor-parallel-size {etp}" + (
        "" if parallel.expert_tensor_parallel_size else " (the tensor size)"
    )
    if moe.num_experts % ep:
        problems.append(
            f"--num-experts {moe.num_experts} cannot be divided over --expert-model-parallel-size {ep}; choose a size "
            "that divides the experts"
        )
    if moe.expert_width % etp:
        problems.append(
            f"--moe-ffn-hidden-size {moe.moe_ffn_hidden_size} cannot be divided over {own}; choose "
            f"{moe.expert_width // etp * etp or etp} or {-(-moe.expert_width // etp) * etp}"
        )
    if world_size % (etp * ep * pp):
        problems.append(
            f"{world_size} ranks are not a multiple of {own} x --expert-model-parallel-size {ep} x "
            f"--pipeline-model-parallel-size {pp} = {etp * ep * pp}; start a multiple of {etp * ep * pp} ranks"
        )
    shared = moe.moe_shared_expert_intermediate_size
    if shared is not None and shared % tp:
        problems.append(
            f"--moe-shared-expert-intermediate-size {shared} cannot be divided over --tensor-model-parallel-size {tp}; "
            f"choose {shared // tp * tp or tp} or {-(-shared // tp) * tp}"
        )
    return "\n  ".join(problems)


RULES = (Rule("experts-over-ranks", expert_layout, "experts and their widths can be divided over the ranks"),)


ALWAYS = (Rule("experts", experts, "what is said of experts has experts, and the parts it speaks of"),)
