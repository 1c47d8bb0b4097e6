"""The checker of configurations: what it says of bad ones, and that the changes it proposes are enough and the fewest."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pytest

from megatron.core.config.flags.declare import flag_fields
from megatron.core.config.rules.engine import ALWAYS, NEEDS, RULES
from megatron.core.config.settings.run import RequestedRun
from megatron.plan.command import ParsedTrainingCommand, parse_training_command
from megatron.plan.repair import candidate_edits, flags_named_by_rule, smallest_repair
from megatron.plan.setup import WORLD, BrokenRule, RunSetup
from tests.unit.plan.bad_configs import BAD, GPT


def command(flags: str, ranks: int = 1) -> ParsedTrainingCommand:
    """The flags of GPT and these, of the script that they begin with."""
    words = flags.split()
    entry = [words.pop(0)] if words and words[0].endswith(".py") else ["pretrain_gpt.py"]
    return parse_training_command([*entry, *GPT.split(), *words], ranks=ranks)


def setting(flags: str, ranks: int = 1) -> RunSetup:
    found = command(flags, ranks).setting
    assert found is not None, f"{flags} cannot be read"
    return found


def test_the_flags_behind_which_the_table_stands_keep_every_rule() -> None:
    for entry in ("pretrain_gpt.py", "pretrain_bert.py", "pretrain_t5.py"):
        assert setting(entry).find_broken_rules() == ()
    assert len(BAD) >= 100


def test_the_table_breaks_every_rule_that_flags_can_break() -> None:
    names = {rule.name for rule in (*NEEDS, *RULES, *ALWAYS)}
    # Broken by what is missing, or by a network that reads images: tests/unit/verify/test_rule_page.py
    elsewhere = {"learning-rate", "image-sizes", "images-in-text", "image-tiles", "image-classifier"}
    assert names - {name for row in BAD for name in row[2].split()} == elsewhere


@pytest.mark.parametrize("ranks, flags, names, count", BAD, ids=[row[1] for row in BAD])
def test_a_bad_configuration_breaks_its_rules_and_is_mended_by_the_fewest_changes(
    ranks: int, flags: str, names: str, count: int
) -> None:
    found = command(flags, ranks)
    assert found.setting is not None
    broken = (*found.unread, *found.setting.find_broken_rules())
    assert {one.rule for one in broken} == set(names.split()), broken
    answer = smallest_repair(found.setting)
    assert answer.edits is not None and answer.fewest
    assert len(answer.edits) == count, list(map(str, answer.edits))
    assert found.setting.with_values({edit.name: edit.after for edit in answer.edits}).find_broken_rules() == ()
    for edit in answer.edits:
        others = {other.name: other.after for other in answer.edits if other is not edit}
        assert (
            {one.rule for one in found.setting.with_values(others).find_broken_rules()} == set(edit.mends) != set()
        ), "each change is needed"


def single_changes(start: RunSetup) -> Iterator[dict[str, Any]]:
    """Every flag with other values, whether a rule names them or not."""
    sizes = [*range(1, 34), 48, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192]
    yield from ({WORLD: size} for size in sizes)
    for field, kind in flag_fields(RequestedRun):
        kinds = get_args(kind) if type(None) in get_args(kind) else (kind,)
        for one in kinds:
            values = (
                [True, False]
                if one is bool
                else sizes
                if one is int
                else [0.0, 0.5, 1.0]
                if one is float
                else get_args(one)
                if get_origin(one) is Literal
                else [None]
                if one is type(None)
                else []
            )
            yield from ({field.name: value} for value in values if value != start.value(field.name))


@pytest.mark.parametrize(
    "flags, ranks",
    [
        ("--tensor-model-parallel-size 8 --ffn-hidden-size 8190 --global-batch-size 129", 8),
        ("--swiglu --relu --quick-geglu --num-layers 2", 1),
    ],
)
def test_no_single_change_of_any_flag_mends_what_is_said_to_need_two(flags: str, ranks: int) -> None:
    start = setting(flags, ranks)
    answer = smallest_repair(start)
    assert answer.edits is not None and len(answer.edits) == 2
    enough = [
        change
        for change in single_changes(start)
        if change != {"mock_data": True} and not start.with_values(change).find_broken_rules()
    ]
    assert not enough, enough[:5]


def test_the_nearest_of_equally_few_changes_is_chosen() -> None:
    start = setting("--global-batch-size 100", 8)
    answer = smallest_repair(start)
    assert [(edit.name, edit.after) for edit in answer.edits] == [("global_batch_size", 96)]
    (one,) = start.find_broken_rules()
    mending = [
        edit
        for name in flags_named_by_rule(one, start)
        for edit in candidate_edits(start, one, name)
        if not start.with_values({name: edit.after}).find_broken_rules()
    ]
    assert len(mending) > 3 and min(edit.far for edit in mending) == answer.edits[0].far


def test_flags_that_are_fixed_stay() -> None:
    start = setting("--tensor-model-parallel-size 3", 8)
    assert [edit.name for edit in smallest_repair(start).edits] == ["tensor_model_parallel_size"]
    answer = smallest_repair(start, fixed=["tensor_model_parallel_size"])
    assert "tensor_model_parallel_size" not in {edit.name for edit in answer.edits}
    assert start.with_values({edit.name: edit.after for edit in answer.edits}).find_broken_rules() == ()


def test_what_cannot_be_mended_is_said_so() -> None:
    start = setting("--fp16 --bf16", 1)
    answer = smallest_repair(start, fixed=["fp16", "bf16"])
    assert answer.edits is None and not answer.fewest


def test_a_search_that_may_look_at_little_does_not_claim_the_fewest() -> None:
    start = setting("--tensor-model-parallel-size 8 --ffn-hidden-size 8190 --global-batch-size 129", 8)
    assert not smallest_repair(start, tries=2).fewest


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--fp16 --bf16", "leave out --fp16"),
        ("--overlap-param-gather", "add --use-distributed-optimizer"),
        ("--save-interval 100", "leave out --save-interval 100"),
        ("--global-batch-size 100 --micro-batch-size 8", "--global-batch-size 100 -> 96"),
        ("--lr-warmup-iters 1000 --lr-decay-iters 1000 --tensor-model-parallel-size 4", "ranks 2 -> 4"),
        (
            "--hybrid-context-parallel --reset-attention-mask --max-seqlen-per-dp-cp-rank 1024 --no-calculate-per-token-loss",
            "add --calculate-per-token-loss",
        ),
        ("--recompute-granularity full", "add --recompute-method uniform"),
    ],
)
def test_changes_are_said_as_flags(flags: str, said: str) -> None:
    fixed = ["tensor_model_parallel_size"]
    assert said in map(str, smallest_repair(setting(flags, 2), fixed=fixed).edits)


@pytest.mark.parametrize(
    "says, names",
    [
        (
            "--decoder-first/last-pipeline-num-layers make uneven",
            ["decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"],
        ),
        ("12 ranks are not a multiple of --tensor-model-parallel-size 8", [WORLD, "tensor_model_parallel_size"]),
        ("--disable-bias-linear", ["add_bias_linear"]),
        ("--nothing-of-ours 3", []),
        ("--ffn-hidden-size 9", ["ffn_hidden_size", "hidden_size"]),
        ("--num-query-groups 3", ["num_attention_heads"]),
    ],
)
def test_the_flags_that_a_rule_speaks_of_are_found(says: str, names: list[str]) -> None:
    assert flags_named_by_rule(BrokenRule("x", says), setting("")) == names


def test_values_that_a_rule_names_are_tried() -> None:
    start = setting("--tensor-model-parallel-size 4 --ffn-hidden-size 5461", 4)
    (one,) = start.find_broken_rules()
    assert {5460, 5464} <= {edit.after for edit in candidate_edits(start, one, "ffn_hidden_size")}
    assert {1} <= {edit.after for edit in candidate_edits(start, one, "tensor_model_parallel_size")}


@pytest.mark.parametrize(
    "words, ranks, architecture",
    [
        ("torchrun --nproc_per_node 8 --nnodes=4 pretrain_gpt.py", 32, "gpt"),
        ("torchrun --nproc-per-node=8 a/pretrain_bert.py", 8, "bert"),
        ("torchrun --nnodes 2:4 --nproc-per-node 8 pretrain_t5.py", 32, "t5"),
        ("--nproc_per_node 2 --node_rank 1 pretrain_gpt.py", 2, "gpt"),
        ("python pretrain_bert.py", 1, "bert"),
        ("torchrun --nproc-per-node gpu pretrain_gpt.py", 1, "gpt"),
    ],
)
def test_ranks_and_network_are_read_from_a_command(words: str, ranks: int, architecture: str) -> None:
    found = parse_training_command([*words.split(), *GPT.split()])
    assert (
        found.unread == ()
        and found.setting.world_size == ranks
        and found.setting.config.model.architecture.name == architecture
    )


def test_a_rule_never_fails_on_sizes_that_make_no_sense() -> None:
    sizes = (0, -1, 3, 10**6)
    names = [
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "num_attention_heads",
        "num_query_groups",
        "micro_batch_size",
        "seq_length",
    ]
    start = setting(
        "--num-experts 8 --hybrid-context-parallel --max-seqlen-per-dp-cp-rank 4 --group-query-attention --num-layers 2",
        2,
    )
    for (one, first), (other, second) in itertools.product(itertools.product(names, sizes), repeat=2):
        assert start.with_values({one: first, other: second}).find_broken_rules(), "10**6 and 3 fit nowhere here"
