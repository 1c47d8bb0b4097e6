"""The checker of configurations: what it says of bad ones, and that each change it proposes keeps its rule by itself."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest

from megatron.core.config.rules.engine import ALWAYS, NEEDS, RULES
from megatron.plan.command import ParsedTrainingCommand, parse_training_command
from megatron.plan.repair import LATER, candidate_edits, flags_named_by_rule, mending_edits
from megatron.plan.setup import WORLD, BrokenRule, RunSetup
from tests.unit.plan.bad_configs import BAD, GPT

# Rules that no change of one flag keeps that the message suggests.
UNKNOWN = (
    "--rampup-batch-size cannot get from 16 to the global batch size 128 in steps of 24; choose an increment that divides 112",
    "--swiglu and --quick-geglu and --relu each choose the activation; keep one",
    "--hidden-dropout 1.0, --attention-dropout 1.0: a share from 0 up to, but not, 1",
    "--micro-batch-size must be given",
)


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


@pytest.mark.parametrize("ranks, flags, names", BAD, ids=[row[1] for row in BAD])
def test_a_bad_configuration_breaks_its_rules_and_each_is_kept_by_one_change(
    ranks: int, flags: str, names: str
) -> None:
    found = command(flags, ranks)
    assert found.setting is not None
    rules = found.setting.find_broken_rules()
    assert {one.rule for one in (*found.unread, *rules)} == set(names.split()), rules
    before = Counter(one.rule for one in rules)
    for one in rules:
        edits = mending_edits(found.setting, one)
        assert bool(edits) == (one.says not in UNKNOWN), (one, list(map(str, edits)))
        for edit in edits:
            after = Counter(
                other.rule for other in found.setting.with_values({edit.name: edit.after}).find_broken_rules()
            )
            assert after[one.rule] < before[one.rule], f"{edit} does not keep {one}"
            assert (after - before).keys() <= LATER, f"{edit} breaks {after - before}"


def test_the_nearest_value_that_keeps_a_rule_is_proposed() -> None:
    start = setting("--global-batch-size 100", 8)
    (one,) = start.find_broken_rules()
    (edit,) = mending_edits(start, one)
    assert str(edit) == "--global-batch-size 100 -> 96"
    mending = [
        edit.after
        for edit in candidate_edits(start, one, "global_batch_size")
        if edit.after and not start.with_values({edit.name: edit.after}).find_broken_rules()
    ]
    assert len(mending) > 3 and min(mending, key=lambda size: abs(math.log2(size / 100))) == 96


def test_flags_that_are_fixed_stay() -> None:
    start = setting("--fp16 --bf16")
    (one,) = start.find_broken_rules()
    assert list(map(str, mending_edits(start, one))) == ["leave out --fp16", "leave out --bf16"]
    assert list(map(str, mending_edits(start, one, fixed=["fp16"]))) == ["leave out --bf16"]
    assert mending_edits(start, one, fixed=["fp16", "bf16"]) == []


def test_a_change_is_proposed_although_it_lets_later_checks_begin() -> None:
    start = setting("--fp16 --bf16 --freeze nowhere")
    (one,) = start.find_broken_rules()
    edits = mending_edits(start, one)
    assert one.rule == "number-formats" and len(edits) == 2
    (later,) = start.with_values({edits[0].name: edits[0].after}).find_broken_rules()
    assert later.rule == "trained-parameters"


def test_a_change_that_breaks_another_rule_is_not_proposed() -> None:
    # 18 heads are nearer to 20, and cannot be divided over 4 ranks.
    start = setting("--hidden-size 1152 --num-attention-heads 20 --tensor-model-parallel-size 4", 4)
    (one,) = start.find_broken_rules()
    tried = [edit.after for edit in candidate_edits(start, one, "num_attention_heads")]
    heads = [edit.after for edit in mending_edits(start, one) if edit.name == "num_attention_heads"]
    assert one.rule == "head-size" and heads == [24] and tried.index(18) < tried.index(24)


@pytest.mark.parametrize("value", ["inf", "nan"])
def test_a_number_that_is_not_finite_has_a_nearest_change_too(value: str) -> None:
    start = setting(f"--qk-clip-threshold {value}")
    (one,) = start.find_broken_rules()
    assert str(mending_edits(start, one)[0]) == f"--qk-clip-threshold {value} -> 100"


def test_a_default_of_the_script_is_not_to_be_left_out() -> None:
    start = replace(setting(""), whole=True, device="cpu")
    missing = start.find_broken_rules()
    assert {one.rule for one in missing} == {"tokenizer"} and "needs --vocab-file" in missing[0].says
    assert not [edit for one in missing for edit in mending_edits(start, one)]


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--overlap-param-gather", "add --use-distributed-optimizer"),
        ("--save-interval 100", "leave out --save-interval 100"),
        ("--global-batch-size 100 --micro-batch-size 8", "--global-batch-size 100 -> 96"),
        ("--tensor-model-parallel-size 4", "ranks 2 -> 4"),
        (
            "--hybrid-context-parallel --reset-attention-mask --max-seqlen-per-dp-cp-rank 1024 --no-calculate-per-token-loss",
            "add --calculate-per-token-loss",
        ),
        ("--recompute-granularity full", "add --recompute-method uniform"),
    ],
)
def test_changes_are_said_as_flags(flags: str, said: str) -> None:
    start = setting(flags, 2)
    assert said in [str(edit) for one in start.find_broken_rules() for edit in mending_edits(start, one)]


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
        ("--ffn-hidden-size 9", ["ffn_hidden_size"]),
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
