"""Small configs keep what their flags choose, keep the rules, and say what they lost."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from megatron.cli.preflight import resolve_and_examine
from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.plan.layers import network_layer_plans
from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.config.rules.engine import broken_rules
from megatron.core.config.settings.run import RunConfig
from megatron.core.pipeline_parallel.schedules import can_overlap_pair, pipeline_training_plan
from megatron.plan.command import parse_training_command
from megatron.plan.setup import RunSetup
from megatron.verify.parity.proxy_config import ProxyConfig, make_proxy_config, proxy_degree_candidates
from tests.helpers import tiny
from tests.parity.table import MODELS, ROWS, named, read_layout

BASE = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --micro-batch-size 4 --global-batch-size 1024 "
    "--train-iters 1000 --lr 1e-4 --mock-data --bf16 --hidden-dropout 0 --attention-dropout 0 "
)


def config_of(flags: str, ranks: int, entry: str = "pretrain_gpt.py") -> RunConfig:
    """The resolved config of flags that keep the rules."""
    setting = parse_training_command(shlex.split(BASE + flags), ranks=ranks, entry=entry).setting
    config, problems = resolve_and_examine(setting.config, ranks)
    assert not problems, problems
    return config


def small(flags: str, ranks: int, most_ranks: int = 8) -> ProxyConfig:
    """Those flags, made small."""
    return make_proxy_config(config_of(flags, ranks), ranks, most_ranks=most_ranks)


def sizes(found: ProxyConfig) -> dict[str, int]:
    """Axis -> its size."""
    parallel = found.config.parallel
    return {
        "tp": parallel.tp,
        "pp": parallel.pp,
        "cp": parallel.context_parallel_size,
        "dp": parallel.data_parallel_size(found.world_size),
        "ep": parallel.expert_model_parallel_size,
    }


@pytest.mark.parametrize("layout, model", ROWS[::6], ids=[named(*row) for row in ROWS[::6]])
def test_a_row_of_the_table_keeps_its_axes_its_kinds_of_layer_and_the_rules(layout: str, model: str) -> None:
    ranks, changes = read_layout(layout)
    config = tiny.config(ranks, **{**MODELS[model], **changes})
    if model == "hybrid" and list(broken_rules(config, ranks)):
        pytest.skip("the table runs what a command line cannot say: offloaded parts of experts without experts")
    found = make_proxy_config(config, ranks)
    assert list(broken_rules(found.config, found.world_size)) == []
    lost = {change.name for change in found.changes if change.lost}
    assert lost <= {
        "hidden_dropout",
        "attention_dropout",
        "moe_expert_capacity_factor",
        "moe_pad_expert_input_to_capacity",
        "lora_targets",
    }
    parallel, dp = config.parallel, config.parallel.data_parallel_size(ranks)
    before = {
        "tp": parallel.tp,
        "pp": parallel.pp,
        "cp": parallel.context_parallel_size,
        "dp": dp,
        "ep": parallel.expert_model_parallel_size,
    }
    assert {axis: size > 1 for axis, size in sizes(found).items()} == {axis: size > 1 for axis, size in before.items()}
    kinds = [
        {
            (row.mixer, row.has_cross_attention, row.window is not None, row.rope, row.mlp)
            for row in network_layer_plans(one.model)
        }
        for one in (config, found.config)
    ]
    assert kinds[0] == kinds[1]
    assert (len(stage_specs_of_run(config)) > parallel.pp) == (
        len(stage_specs_of_run(found.config)) > found.config.parallel.pp
    ), "chunks stay chunks"


def test_what_is_large_becomes_small_and_numbers_become_exact() -> None:
    found = small(
        "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --sequence-parallel --use-distributed-optimizer",
        64,
    )
    assert sizes(found) == {"tp": 2, "pp": 2, "cp": 1, "dp": 2, "ep": 1} and found.world_size == 8
    model, train = found.config.model, found.config.train
    assert (model.num_layers, train.seq_length, train.micro_batch_size) == (2, 16, 2) and model.hidden_size <= 64
    assert train.global_batch_size > train.micro_batch_size * 2, "several microbatches stay several"
    assert found.config.precision.fp64 and not found.config.precision.bf16
    assert found.config.parallel.sequence_parallel and found.config.parallel.use_distributed_optimizer
    assert (
        found.serial_config.parallel.tp == found.serial_config.parallel.pp == 1
        and not found.serial_config.parallel.use_distributed_optimizer
    )
    assert found.serial_config.train == found.config.train
    said = [str(change) for change in found.changes]
    assert (
        "ranks 64 -> 8" in said and "--num-layers 32 -> 2" in said and not any(change.lost for change in found.changes)
    )


def test_passes_in_turns_stay_so_on_every_stage() -> None:
    found = small(
        "--num-experts 8 --expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall --pipeline-model-parallel-size 4 "
        "--overlap-moe-expert-parallel-comm",
        32,
    )
    train, pp = found.config.train, found.config.parallel.pp
    count = train.global_batch_size // (train.micro_batch_size * sizes(found)["dp"])
    assert pp > 1
    for row in pipeline_training_plan(pp, 1, count, dual_batch_overlap=True):
        assert any(can_overlap_pair(row, place, pp) for place in range(len(row))), f"{count} microbatches are too few"


def test_a_pipeline_without_chunks_keeps_a_middle_stage_where_it_fits() -> None:
    assert sizes(small("--pipeline-model-parallel-size 8", 8))["pp"] == 3
    assert (
        sizes(small("--pipeline-model-parallel-size 8 --tensor-model-parallel-size 4 --sequence-parallel", 64))["pp"]
        == 2
    )


def test_what_does_not_fit_on_few_ranks_is_said_and_more_ranks_bring_it_back() -> None:
    flags = "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --context-parallel-size 2"
    few, many = small(flags, 64), small(flags, 64, most_ranks=16)
    assert sizes(few)["dp"] == 1 and [(change.name, change.lost) for change in few.changes if change.lost] == [
        ("data-parallel size", True)
    ]
    assert sizes(many)["dp"] == 2 and many.world_size == 16 and not any(change.lost for change in many.changes)


@pytest.mark.parametrize(
    "flags, ranks, kept",
    [
        (
            "--num-experts 64 --moe-ffn-hidden-size 128 --moe-router-topk 6 --moe-layer-freq [0]*3+[1]*29 --expert-model-parallel-size 8",
            8,
            {"num_experts": 4, "moe_router_topk": 2, "moe_layer_freq": "[0,1]", "expert_model_parallel_size": 2},
        ),
        (
            "--group-query-attention --num-query-groups 2 --tensor-model-parallel-size 8",
            8,
            {"num_query_groups": 1, "tensor_model_parallel_size": 2},
        ),  # copies of key heads
        (
            "--window-size 1023,0 --window-attn-skip-freq 4 --position-embedding-type rope",
            1,
            {"window_size": "4,0", "window_attn_skip_freq": "[1,0]"},
        ),
        (
            "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et*7|t*9|t*9|t*7L",
            4,
            {"pipeline_model_parallel_layout": "Et|tt|tL", "pipeline_model_parallel_size": 3},
        ),
        (
            "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 2",
            4,
            {"decoder_first_pipeline_num_layers": 1, "num_layers": 5, "pipeline_model_parallel_size": 3},
        ),
        (
            "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2",
            4,
            {"num_layers_per_virtual_pipeline_stage": 1, "num_layers": 4, "pipeline_model_parallel_size": 2},
        ),
        (
            "--context-parallel-size 8 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4 2",
            8,
            {"context_parallel_size": 4, "hierarchical_context_parallel_sizes": (2, 2)},
        ),
        (
            "--hybrid-context-parallel --max-seqlen-per-dp-cp-rank 1024 --reset-attention-mask",
            8,
            {"max_seqlen_per_dp_cp_rank": 4},
        ),  # 4 ranks
        ("--overlap-grad-reduce --use-distributed-optimizer", 8, {"ddp_bucket_size": 400, "overlap_grad_reduce": True}),
        (
            "--fp16 --no-bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 4",
            1,
            {"recompute_num_layers": 2, "fp16": False},
        ),
    ],
)
def test_a_feature_stays_in_its_smallest_form(flags: str, ranks: int, kept: dict[str, Any]) -> None:
    found = small(flags, ranks)
    after = RunSetup(found.config, found.world_size)
    assert {name: after.value(name) for name in kept} == kept


def test_what_cannot_be_compared_is_switched_off_and_said() -> None:
    found = small(
        "--hidden-dropout 0.1 --tensor-model-parallel-size 2 --num-experts 8 --moe-ffn-hidden-size 64 --expert-tensor-parallel-size 1 "
        "--moe-expert-capacity-factor 1.2 --moe-input-jitter-eps 0.01 --attention-backend flash",
        2,
    )
    lost = {change.name: change.after for change in found.changes if change.lost}
    assert lost == {
        "hidden_dropout": 0.0,
        "moe_input_jitter_eps": None,
        "moe_expert_capacity_factor": None,
        "attention_backend": "auto",
    }
    counts = "--num-experts 8 --moe-ffn-hidden-size 64 --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1"
    assert [change.after for change in small(counts, 2).changes if change.lost] == [("aux_loss",)], (
        "ranks of data see other microbatches so far"
    )
    assert not any(change.lost for change in small(f"{counts} --tensor-model-parallel-size 2", 2).changes)
    alone = small("--hidden-dropout 0.1 --recompute-granularity full --recompute-method uniform", 1)
    assert alone.config.model.hidden_dropout == 0.1, "recomputation draws what the first pass drew"


def test_too_few_ranks_for_anything_are_refused_with_the_rule() -> None:
    config = config_of("--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2", 4)
    assert all(one.num_ranks <= 2 for one in proxy_degree_candidates(config, 4, 2))
    with pytest.raises(ConfigError, match="no small form of this config on at most 0 ranks"):
        make_proxy_config(config, 4, most_ranks=0)


def test_a_bert_and_a_t5_stay_what_they_are() -> None:
    for entry, flags in (
        ("pretrain_bert.py", "--tensor-model-parallel-size 2"),
        ("pretrain_t5.py", "--pipeline-model-parallel-size 2"),
    ):
        found = make_proxy_config(config_of(flags, 4, entry), 4)
        assert sizes(found)["dp"] == 2 and found.config.model.architecture.name == entry[9:-3]
