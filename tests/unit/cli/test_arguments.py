"""From words to a checked config: every spelling, files, checkpoints, and everything that is wrong at once."""

from __future__ import annotations

import argparse
import dataclasses
import json
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from megatron.cli.arguments import make_parser, parse_args, parse_args_unchecked
from megatron.core.config.flags.declare import (
    ConfigError,
    config_from_namespace,
    config_to_flat_dict,
    flag,
    flag_fields,
    flag_name,
)
from megatron.core.config.settings.run import RequestedRun
from megatron.core.dist_checkpointing import checkpoint_folders
from tests.helpers.flags import parse_args_or_raise, run_config_of_args
from tests.helpers.programme import trained, write_tokens

NEEDED = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 --lr 1e-3 "
    "--train-iters 4 --mock-data --tokenizer-type NullTokenizer --vocab-size 30"
).split()


@dataclass(frozen=True, slots=True)
class Extra:
    """A script's own settings."""

    own_number: int = flag(3, "a number of the script's own")
    own_switch: bool = flag(False, "a switch of the script's own")


def read(words: str = "", **keywords: Any) -> argparse.Namespace:
    """NEEDED and more."""
    return parse_args_or_raise([*NEEDED, *words.split()], **keywords)


def problems(words: list[str], **keywords: Any) -> list[str]:
    """The lines of the error, without its heading."""
    with pytest.raises(ConfigError) as caught:
        parse_args_or_raise(words, **keywords)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def sample(kind: Any, parse: Any) -> tuple[list[str], Any]:
    """Words for a field of this type, and what they mean."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return sample(next(a for a in inner if a is not type(None)), parse)
    if origin is tuple:
        words, value = sample(inner[0], parse)
        return words * 2, [value] * 2
    if origin is Literal:
        return [str(inner[-1])], inner[-1]
    return {int: (["7"], 7), float: (["0.25"], 0.25), str: (["word"], "word")}[kind]


FIELDS = flag_fields(RequestedRun)


@pytest.mark.parametrize("field, kind", FIELDS, ids=[field.name for field, _ in FIELDS])
def test_every_spelling_of_a_flag_sets_its_field(field: dataclasses.Field, kind: Any) -> None:
    parser = make_parser()
    if kind is bool:
        on = [flag_name(field.name), *field.metadata["also"]]
        off = ["--no-" + flag_name(field.name)[2:], *([field.metadata["off"]] if field.metadata["off"] else [])]
        cases = [([word], True) for word in on] + [([word], False) for word in off]
    else:
        words, value = sample(kind, field.metadata["parse"])
        names = [flag_name(field.name), *field.metadata["also"]]
        cases = [([name, *words], value) for name in names]
        cases += [([f"{name}={words[0]}"], value) for name in names if len(words) == 1]
    for words, value in cases:
        assert getattr(parser.parse_args(words), field.name) == value, words
    assert getattr(parser.parse_args([]), field.name) == field.default


def test_every_flag_is_shown_in_a_group_of_the_help() -> None:
    text = make_parser().format_help()
    missing = [
        field.name
        for field, kind in FIELDS
        if flag_name(field.name) not in text
        and "--no-" + flag_name(field.name)[2:] not in text
        and (field.metadata["off"] or "?") not in text
    ]
    assert not missing
    for title in ("Model", "Parallelism", "Training", "Checkpoints", "Reports", "Data", "Tokenizer"):
        assert f"\n{title}:\n" in text


def test_a_namespace_becomes_the_config_it_came_from() -> None:
    args = read(
        "--group-query-attention --num-query-groups 2 --rampup-batch-size 2 2 8 --global-batch-size 4 --iterations-to-skip 3"
    )
    config = config_from_namespace(RequestedRun, args)
    assert (
        config.model.num_query_groups == 2
        and config.train.rampup_batch_size == (2, 2, 8)
        and config.train.iterations_to_skip == (3,)
    )
    again = config_from_namespace(RequestedRun, argparse.Namespace(**config_to_flat_dict(config)))
    assert again == config


def test_words_are_not_abbreviated() -> None:
    assert problems([*NEEDED, "--num-layer", "3"])[0].startswith("--num-layer is not a flag; did you mean --num-layers")


def test_the_defaults_of_a_script_hold_where_nothing_is_given() -> None:
    words = [word for word in NEEDED if word not in ("--tokenizer-type", "NullTokenizer")]
    assert parse_args_or_raise(words, defaults={"tokenizer_type": "ByteTokenizer"}).tokenizer_type == "ByteTokenizer"
    assert parse_args_or_raise(NEEDED, defaults={"tokenizer_type": "ByteTokenizer"}).tokenizer_type == "NullTokenizer"


def test_a_script_adds_flags_of_its_own() -> None:
    def provider(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--by-hand", type=int, default=1)

    args = read("--own-number 5 --own-switch --by-hand 6", extra=(Extra,), provider=provider)
    assert config_from_namespace(Extra, args) == Extra(5, True) and args.by_hand == 6
    assert any(
        "--own-numbr is not a flag; did you mean --own-number" in line
        for line in problems([*NEEDED, "--own-numbr", "5"], extra=(Extra,))
    )


# --- YAML


def test_a_yaml_file_gives_flags_under_any_headings(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "model": {"num_layers": 2, "hidden-size": 16, "attention": {"num_attention_heads": 2}},
                "train": {"seq_length": 16, "micro_batch_size": 2, "train_iters": 4, "iterations_to_skip": [1, 2]},
                "lr": 0.001,
                "mock_data": True,
                "add_bias_linear": False,
                "tokenizer_type": "NullTokenizer",
                "vocab_size": 30,
                "save": None,
            }
        )
    )
    args = parse_args_or_raise(["--yaml-cfg", str(file)])
    values = {
        name: getattr(args, name)
        for name in (
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "iterations_to_skip",
            "lr",
            "mock_data",
            "add_bias_linear",
            "save",
        )
    }
    assert values == {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "iterations_to_skip": [1, 2],
        "lr": 0.001,
        "mock_data": True,
        "add_bias_linear": False,
        "save": None,
    }


@pytest.mark.parametrize("form", ["--yaml-cfg {}", "--yaml-cfg={}"])
@pytest.mark.parametrize("order", [0, 1])
def test_the_command_line_wins_over_the_yaml_file_on_both_sides_of_it(tmp_path: Path, form: str, order: int) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("num_layers: 8\nadd_bias_linear: false\nseed: 99\n")
    parts = [form.format(file).split(), [*NEEDED, "--add-bias-linear"]]
    args = parse_args_or_raise([word for part in (parts if order else parts[::-1]) for word in part])
    assert (args.num_layers, args.add_bias_linear, args.seed) == (2, True, 99)


def test_old_and_unknown_flags_in_a_yaml_file_are_treated_alike(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("batch_size: 4\nuse_mcore_models: true\n")
    args = read(f"--yaml-cfg {file}")
    assert any("--batch-size 4 is understood as --micro-batch-size 4" in line for line in args.messages)
    assert any("--use-mcore-models is ignored" in line for line in args.messages)
    file.write_text("num_leyers: 4\n")
    assert problems([*NEEDED, "--yaml-cfg", str(file)])[0].startswith(
        "--num-leyers is not a flag; did you mean --num-layers"
    )


@pytest.mark.parametrize(
    "content, message",
    [(None, "cannot be read"), ("a: [1", "cannot be read"), ("- 1\n- 2\n", "holds a list; it must be a mapping")],
)
def test_a_yaml_file_that_cannot_be_used_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "run.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        parse_args_or_raise([*NEEDED, "--yaml-cfg", str(file)])
    assert str(file) in str(caught.value)


# --- what is wrong


def test_unknown_flags_old_flags_and_broken_rules_come_in_one_message() -> None:
    found = problems(
        [
            *NEEDED,
            "--num-leyers",
            "4",
            "--use-mup",
            "--num-attention-heads",
            "3",
            "--bf16",
            "--fp16",
            "--zzzz-qqqq",
            "--tensor-model-parallel-size",
            "2",
            "--save-interval",
            "5",
        ],
        world_size=2,
    )
    for words in (
        "--num-leyers is not a flag; did you mean --num-layers",
        "--zzzz-qqqq is not a flag",
        "--use-mup:",
        "--num-attention-heads 3 cannot be divided over --tensor-model-parallel-size 2",
        "--fp16 and --bf16 contradict",
        "--save-interval 5 has no effect; give --save",
    ):
        assert sum(words in line for line in found) == 1, (words, found)
    assert "did you mean" not in next(line for line in found if "--zzzz-qqqq" in line)


def test_an_empty_command_line_is_told_everything_it_lacks() -> None:
    found = " ".join(problems([]))
    for name in (
        "--num-layers",
        "--hidden-size",
        "--num-attention-heads",
        "--seq-length",
        "--micro-batch-size",
        "--lr",
        "--train-iters",
        "--data-path",
    ):
        assert name in found, found


@pytest.mark.parametrize(
    "words, message",
    [
        ("--num-layers two", "--num-layers two: give a whole number"),
        ("--num-layers", "--num-layers has no value; give one"),
        (
            "--optimizer lino",
            "--optimizer lino: choose adam, sgd, lion, adafactor, muon, dist_muon or soap; did you mean lion?",
        ),
        ("--bf16=yes", "--bf16 is a switch, and takes no value; write --bf16 or --no-bf16 alone"),
        ("stray", "'stray' belongs to no flag; leave it out"),
        ("--step-batch-size-schedule 0:2 1M:4", "put quotes around it: --step-batch-size-schedule '0:2 1M:4'"),
        ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size 0: each must be at least 1"),
        (
            "--pipeline-model-parallel-size 0 --micro-batch-size 0",
            "--pipeline-model-parallel-size 0, --micro-batch-size 0",
        ),
        ("--train-samples 8", "--train-iters and --train-samples both say"),
        ("--global-batch-size 3", "--global-batch-size 3 is not a multiple"),
        ("--lr-warmup-iters 4", "the warm-up of 8 samples does not end before the decay horizon"),
        (
            "--global-batch-size 4 --rampup-batch-size 1 1 8",
            "global batch size 1 is not a multiple of micro batch size",
        ),
        ("--step-batch-size-schedule 0:2,bad", "entry 'bad' is not TOKENS:SIZE"),
        ("--recompute-method block", "--recompute-method block has no effect; give --recompute-granularity full"),
        ("--hidden-dropout 1.5", "--hidden-dropout 1.5: a share from 0"),
        (
            "--use-checkpoint-args",
            "--use-checkpoint-args has no checkpoint to read; give --load or --pretrained-checkpoint",
        ),
    ],
)
def test_a_mistake_is_named_with_its_value(words: str, message: str) -> None:
    found = problems([*NEEDED, *words.split()])
    assert any(message in line for line in found), found


@pytest.mark.parametrize(
    "words, name, value",
    [
        ("--hybrid-layer-pattern -GG", "hybrid_layer_pattern", "-GG"),
        ("--hybrid-layer-pattern --M", "hybrid_layer_pattern", "--M"),
        ("--hybrid-layer-pattern -", "hybrid_layer_pattern", "-"),
        ("--window-size -1,0", "window_size", "-1,0"),
        ("--min-lr -1e-5", "min_lr", -1e-5),
        ("--glu-linear-offset -1e-3", "glu_linear_offset", -1e-3),
        ("--mamba-time-step-limit -1e-3 inf", "mamba_time_step_limit", (-1e-3, float("inf"))),
        ("--freeze -x --bf16", "freeze", ("-x",)),
    ],
)
def test_a_value_may_begin_with_a_dash(words: str, name: str, value: Any, tmp_path: Path) -> None:
    flag, *given = words.removesuffix(" --bf16").split()
    (tmp_path / "flags.yaml").write_text(yaml.safe_dump({flag[2:]: " ".join(given) if len(given) == 1 else given}))
    for line in ([*NEEDED, *words.split()], [*NEEDED, "--yaml-cfg", str(tmp_path / "flags.yaml")]):
        args = parse_args_unchecked(line)
        assert not args.problems and tuple_if_list(getattr(args, name)) == value, args.problems


def tuple_if_list(value: Any) -> Any:
    """Values of a flag with several, as the config has them."""
    return tuple(value) if isinstance(value, list) else value


def test_what_is_written_like_a_flag_is_one() -> None:
    args = parse_args_unchecked([*NEEDED, "--min-lr", "--mim-lr", "3"])
    assert any("--mim-lr is not a flag" in line for line in args.problems) and any(
        "--min-lr has no value" in line for line in args.problems
    )


def test_parse_args_prints_the_message_and_exits_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args([*NEEDED, "--num-leyers", "4"])
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith(
        "ConfigError: 1 setting cannot be used as given\n  --num-leyers is not a flag; did you mean --num-layers"
    )
    assert parse_args([*NEEDED]).given["num_layers"] == 2


def test_read_flags_leaves_rules_alone() -> None:
    args = parse_args_unchecked(["--num-layers", "3", "--num-leyers", "3"])
    assert args.num_layers == 3 and len(args.problems) == 1


# --- what is worked out


def test_the_batch_is_one_microbatch_on_every_rank_when_it_is_not_given() -> None:
    assert run_config_of_args(read(), 1).train.global_batch_size == 2
    args = read("--tensor-model-parallel-size 2", world_size=8)
    assert run_config_of_args(args, 8).train.global_batch_size == 2 * 4


def test_a_batch_schedule_counts_in_its_last_batch() -> None:
    args = read("--step-batch-size-schedule 0:2,64:8")
    assert run_config_of_args(args, 1).train.global_batch_size == 8


def test_old_spellings_are_translated_and_told() -> None:
    args = read("--batch-size 4 --no-masked-softmax-fusion")
    assert args.micro_batch_size == 4
    assert args.messages[0] == "--batch-size 4 is understood as --micro-batch-size 4"
    assert args.messages[1].startswith("--no-masked-softmax-fusion is ignored: ")


# --- from a checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of a network that no default describes."""
    folder = tmp_path_factory.mktemp("checkpoint")
    trained(
        [
            *write_tokens(folder / "walks"),
            "--train-iters",
            "1",
            "--save",
            str(folder / "save"),
            "--num-layers",
            "3",
            "--swiglu",
            "--ffn-hidden-size",
            "48",
            "--normalization",
            "RMSNorm",
            "--group-query-attention",
            "--num-query-groups",
            "1",
            "--kv-channels",
            "6",
            "--position-embedding-type",
            "rope",
            "--hidden-dropout",
            "0.3",
        ]
    )
    return str(folder / "save")


SHORT = "--seq-length 16 --micro-batch-size 2 --lr 1e-3 --train-iters 4 --mock-data --use-checkpoint-args".split()


def test_use_checkpoint_args_takes_the_shape_and_the_tokenizer(checkpoint: str) -> None:
    args = parse_args_or_raise([*SHORT, "--load", checkpoint, "--num-layers", "7"])
    taken = (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "swiglu",
        "normalization",
        "num_query_groups",
        "kv_channels",
        "position_embedding_type",
        "tokenizer_type",
        "vocab_size",
    )
    assert [getattr(args, name) for name in taken] == [3, 16, 2, True, "RMSNorm", 1, 6, "rope", "NullTokenizer", 31]
    assert (args.hidden_dropout, args.micro_batch_size, args.lr) == (0.1, 2, 1e-3), (
        "what is free stays the command line's"
    )
    saved = json.loads((Path(checkpoint) / "iter_0000001" / "config.json").read_text())["values"]
    config = run_config_of_args(args, 1)
    assert config.model.ffn_hidden_size == saved["ffn_hidden_size"] and config.model.kv_channels == saved["kv_channels"]


def test_the_tokenizer_of_the_command_line_is_kept_on_demand(checkpoint: str) -> None:
    words = [*SHORT, "--load", checkpoint, "--tokenizer-type", "NullTokenizer", "--vocab-size", "77"]
    assert parse_args_or_raise(words).vocab_size == 31
    args = parse_args_or_raise([*words, "--no-use-tokenizer-model-from-checkpoint-args"])
    assert args.vocab_size == 77 and args.num_layers == 3


@pytest.fixture
def before(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The checkpoint as it would have been saved when NullTokenizer had an id more than --vocab-size."""
    describe = checkpoint_folders.read_saved_run_config
    monkeypatch.setattr(
        checkpoint_folders,
        "read_saved_run_config",
        lambda folder: dataclasses.replace(describe(folder), values={**describe(folder).values, "vocab_size": 30}),
    )
    return checkpoint


def test_a_null_tokenizer_goes_on_with_the_ids_that_it_had(before: str) -> None:
    assert parse_args_or_raise([*SHORT, "--load", before]).vocab_size == 31
    args = parse_args_or_raise([*NEEDED, "--load", before])
    assert args.vocab_size == 31 and args.messages[-1].startswith(
        f"--vocab-size 30 is taken as 31, which NullTokenizer had when {before}"
    )
    assert parse_args_or_raise([*NEEDED, "--pretrained-checkpoint", before]).vocab_size == 31
    args = parse_args_or_raise([*NEEDED, "--vocab-size", "31", "--load", before])
    assert args.vocab_size == 31 and not args.messages
    assert (
        parse_args_or_raise(
            [*NEEDED, "--load", str(Path(before).parent), "--save", str(Path(before).parent)]
        ).vocab_size
        == 30
    )


def test_a_folder_without_a_checkpoint_to_take_from_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no complete checkpoint to take the settings from"):
        parse_args_or_raise([*SHORT, "--load", str(tmp_path)])
