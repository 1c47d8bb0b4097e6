"""The table of flags that are not ours, and what translating a command line does with them."""

import argparse
import collections
import re

import pytest

from megatron.cli.legacy_flags import (
    FAMILIES,
    REFUSED_VALUES,
    ROWS,
    TABLE,
    find_legacy_flag,
    similar_flags,
    translate_legacy_flags,
)
from megatron.core.config.flags.declare import add_config_arguments, flag_fields, flag_name, flag_spellings
from megatron.core.config.settings.run import RequestedRun

KNOWN = {word for field, kind in flag_fields(RequestedRun) for word in flag_spellings(field, kind)}


def argv(text):
    return text.split()


def translated(text):
    words, messages, errors = translate_legacy_flags(argv(text), KNOWN)
    return " ".join(words), messages, errors


def parsed(text):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_config_arguments(parser, RequestedRun)
    return parser.parse_args(translate_legacy_flags(argv(text), KNOWN)[0])


def test_no_flag_is_both_a_field_and_a_row():
    assert sorted(KNOWN & set(TABLE)) == []


def test_no_flag_has_two_rows():
    assert [flag for flag, count in collections.Counter(row.flag for row in ROWS).items() if count > 1] == []


def test_every_row_says_why_and_is_spelled_as_a_flag():
    for row in ROWS:
        assert len(row.sentence) > 5 and not row.sentence.endswith("."), row
        assert row.flag.startswith("--") and "=" not in row.flag, row
        assert row.kind in ("renamed", "ignored", "later", "refused"), row


def test_every_renamed_flag_becomes_flags_of_ours():
    for row in ROWS:
        assert (row.kind == "renamed") == bool(row.becomes), row
        assert all(word in KNOWN for word in row.becomes if word.startswith("--")), row


def test_a_refused_value_belongs_to_a_field_that_does_not_allow_it():
    choices = {}
    for field, kind in flag_fields(RequestedRun):
        choices.update(
            dict.fromkeys((flag_name(field.name), *field.metadata["also"]), set(re.findall(r"'([^']+)'", str(kind))))
        )
    for flag, value in REFUSED_VALUES:
        assert choices[flag] and value not in choices[flag], (flag, value)


def test_our_own_flags_pass_untouched():
    line = "--num-layers 2 --lr=1e-3 --no-save-optim --train-samples 10 --rampup-batch-size 1 2 3 file -1"
    assert translated(line) == (line, [], [])


@pytest.mark.parametrize(
    "old, new",
    [
        ("--batch-size 4", "--micro-batch-size 4"),
        ("--model-parallel-size=8", "--tensor-model-parallel-size 8"),
        ("--warmup 0.01", "--lr-warmup-fraction 0.01"),
        ("--layernorm-epsilon 1e-6", "--norm-epsilon 1e-6"),
        ("--override-lr-scheduler", "--override-opt-param-scheduler"),
        ("--use-checkpoint-lr-scheduler", "--use-checkpoint-opt-param-scheduler"),
        ("--use-rotary-position-embeddings", "--position-embedding-type rope"),
        ("--checkpoint-num-layers 2", "--recompute-num-layers 2"),
        ("--activations-checkpoint-method block", "--recompute-granularity full --recompute-method block"),
    ],
)
def test_a_renamed_flag_is_rewritten_and_told(old, new):
    words, messages, errors = translated(f"--seed 1 {old} --num-layers 2")
    assert words == f"--seed 1 {new} --num-layers 2" and errors == []
    assert messages == [f"{old.replace('=', ' ')} is understood as {new}"]


def test_an_old_switch_gives_way_to_explicit_settings_wherever_they_stand():
    for line in (
        "--no-position-embedding --use-rotary-position-embeddings",
        "--position-embedding-type rope --no-position-embedding",
    ):
        assert parsed(line).position_embedding_type == "rope"
    assert parsed("--no-position-embedding").position_embedding_type == "none"
    for line in (
        "--checkpoint-num-layers 3 --checkpoint-activations",
        "--checkpoint-activations --checkpoint-num-layers 3",
    ):
        args = parsed(line)
        assert (args.recompute_granularity, args.recompute_method, args.recompute_num_layers) == ("full", "uniform", 3)


@pytest.mark.parametrize(
    "flag",
    [
        "--use-mcore-models",
        "--no-masked-softmax-fusion",
        "--dist-ckpt-strictness log_all",
        "--local_rank=3",
        "--DDP-impl local",
        "--use-flash-attn",
        "--ckpt-format torch",
        "--num-distributed-optimizer-instances 2",
        "--moe-hybridep-num-sms 32",
        "--nccl-communicator-config-path /some/file",
    ],
)
def test_an_ignored_flag_is_taken_out_with_its_values_and_its_reason(flag):
    words, messages, errors = translated(f"--seed 1 {flag} --num-layers 2")
    assert words == "--seed 1 --num-layers 2" and errors == []
    assert messages == [f"{flag.replace('=', ' ')} is ignored: {TABLE[flag.split('=')[0].split()[0]].sentence}"]


@pytest.mark.parametrize(
    "flag, word",
    [
        ("--use-mup", "muP"),
        ("--use-megatron-fsdp", "sharding of weights"),
        ("--fp8-output-proj", "output layer"),
        ("--optimizer-cuda-graph", "records the layers"),
        ("--external-cuda-graph", "say --cuda-graph-impl local"),
        ("--delay-offload-until-cuda-graph", "CPU memory"),
        ("--mamba-training-ssm-states-dtype bf16", "fp32"),
        ("--bert-load x", "BERT"),
        ("--inference-logging-step-interval 9", "generation"),
        ("--grpo-kl-beta 0.1", "reinforcement"),
        ("--language-model-type mistral_7b", "decoder has the shape"),
        ("--retro-workdir /x", "Retro"),
        ("--export-quant-cfg fp8", "export"),
        ("--nproc_per_node 8", "torchrun"),
        ("--spec a.b c", "import path"),
        ("--data-impl lazy", "PREFIX.bin"),
        ("--ict-load x", "ICT"),
    ],
)
def test_what_is_not_built_or_out_of_scope_is_an_error_with_its_reason(flag, word):
    words, messages, errors = translated(f"--seed 1 {flag} --num-layers 2")
    assert words == "--seed 1 --num-layers 2" and messages == []
    (error,) = errors
    assert error.startswith(f"{flag}: ") and word in error


@pytest.mark.parametrize(
    "flag",
    [
        "--start-eval-at-iter=0",
        "--fp8-interval 1.0",
        "--memory-snapshot-path snapshot.pickle",
        "--mamba-training-ssm-states-dtype fp32",
        "--inference-batch-times-seqlen-threshold=-1",
        "--gpu-sniff-test-interval 0",
        "--data-impl mmap",
        "--inference-batch-times-seqlen-threshold -1",
    ],
)
def test_a_value_that_changes_nothing_is_accepted_with_a_sentence(flag):
    words, (message,), errors = translated(f"{flag} --seed 1")
    assert words == "--seed 1" and errors == []
    assert message.startswith(f"{flag.replace('=', ' ')} is accepted, as it changes nothing: ")


def test_all_values_must_change_nothing():
    assert translated("--data-impl mmap mmap")[2] == [] and translated("--data-impl mmap lazy")[2]
    assert translated("--fp8-interval")[2], "a missing value is not a harmless one"


def test_all_errors_come_at_once_and_each_once():
    _, _, errors = translated("--use-mup --fp8-output-proj --use-mup --optimizer adaptive_muon --seed 1")
    assert [error.split(":")[0] for error in errors] == ["--use-mup", "--fp8-output-proj", "--optimizer adaptive_muon"]


@pytest.mark.parametrize(
    "line, flag",
    [
        ("--optimizer adaptive_muon", "--optimizer adaptive_muon"),
        ("--cuda-graph-impl full_iteration", "--cuda-graph-impl full_iteration"),
        ("--cuda-graph-scope moe", "--cuda-graph-scope moe"),
        ("--sft-tokenizer-prompt-format=nemotron-nano-v2", "--sft-tokenizer-prompt-format nemotron-nano-v2"),
    ],
)
def test_a_value_of_our_flag_that_only_megatron_has_is_an_error_with_its_reason(line, flag):
    words, _, (error,) = translated(line)
    assert words == line and error.startswith(f"{flag}: ") and "choose" in error


@pytest.mark.parametrize(
    "line, expected",
    [
        ("--moe-flex-dispatcher-backend hybridep", "--moe-flex-dispatcher-backend auto"),
        ("--cuda-graph-impl=transformer_engine", "--cuda-graph-impl local"),
        ("--cuda-graph-scope attn mlp moe_router moe_preprocess", "--cuda-graph-scope attn mlp"),
    ],
)
def test_a_value_of_our_flag_that_changes_nothing_is_replaced_with_a_sentence(line, expected):
    words, messages, errors = translated(f"{line} --seed 1")
    assert words == f"{expected} --seed 1" and errors == []
    assert messages and all("is accepted, as it changes nothing: " in message for message in messages)


def test_an_old_switch_says_what_it_gives_way_to():
    for line in (
        "--no-position-embedding --use-rotary-position-embeddings",
        "--position-embedding-type rope --no-position-embedding",
    ):
        assert (
            "--no-position-embedding is understood as --position-embedding-type none, which gives way to --position-embedding-type rope"
            in translated(line)[1]
        )
    assert translated("--no-position-embedding")[1] == [
        "--no-position-embedding is understood as --position-embedding-type none"
    ]


def test_gpt_oss_brings_yarn_as_megatron_sets_it_and_gives_way_to_what_is_given():
    args = parsed("--enable-gpt-oss --rotary-scaling-factor 16")
    assert (args.position_embedding_type, args.rotary_scaling_factor, args.yarn_original_max_position_embeddings) == (
        "yarn",
        16,
        131072,
    )
    assert (args.yarn_beta_fast, args.yarn_beta_slow, args.yarn_correction_range_round_to_int) == (32, 1, False)


@pytest.mark.parametrize(
    "flag", ["--no-rl-use-sequence-packing", "--no-rl-persist-cuda-graphs", "--disable-use-persistent-ckpt-worker"]
)
def test_switching_off_what_is_never_on_is_accepted(flag):
    words, (message,), errors = translated(f"{flag} --seed 1")
    assert words == "--seed 1" and errors == [] and "never on" in message


def test_the_second_spelling_of_a_negation_is_the_first():
    assert translated("--disable-mmap-bin-files") == ("--no-mmap-bin-files", [], [])
    assert translated("--disable-bias-linear") == ("--disable-bias-linear", [], []), "a flag of its own"
    words, (message,), _ = translated("--disable-masked-softmax-fusion")
    assert words == "" and "kernels are chosen" in message


def test_a_switch_does_not_swallow_the_words_behind_it():
    assert translated("--use-mcore-models stray --seed 1")[0] == "stray --seed 1"


def test_a_flag_that_nobody_knows_is_left_for_the_parser():
    assert translated("--num-layerz 3 -h --no-such-thing") == ("--num-layerz 3 -h --no-such-thing", [], [])
    assert find_legacy_flag("--no-such-thing", KNOWN) is None


@pytest.mark.parametrize(
    "wrong, right",
    [
        ("--num-layer", "--num-layers"),
        ("--micro_batch_size", "--micro-batch-size"),
        ("--tensorboard-dri=x", "--tensorboard-dir"),
    ],
)
def test_the_nearest_flags_are_suggested(wrong, right):
    assert similar_flags(wrong, KNOWN)[0] == right


def test_nothing_is_suggested_for_nonsense():
    assert similar_flags("--qwertz", KNOWN) == []


def test_families_are_prefixes():
    assert set(FAMILIES) == {"--retro-", "--export-"}
    assert find_legacy_flag("--retro-num-neighbors", KNOWN).kind == "later"
