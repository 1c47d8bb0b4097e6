"""From the command line to a namespace, and from there to a checked `RunConfig`.

    argv -> --yaml-cfg put in front -> old spellings translated -> argparse -> (checkpoint's shape) -> RunConfig -> rules

Whatever is wrong is collected on the way and said in one message; nothing is started before all of it holds.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import yaml

from megatron.cli.command_names import command_name, with_command_names
from megatron.cli.help import HelpAction
from megatron.cli.legacy_flags import similar_flags, translate_legacy_flags
from megatron.core.config.flags.declare import (
    ConfigError,
    accept_values_with_dashes,
    add_config_arguments,
    config_from_namespace,
    config_to_flat_dict,
    field_resume_roles,
    flag_fields,
    flag_name,
    raise_config_error_if,
)
from megatron.core.config.settings.adapter import AdapterConfig
from megatron.core.config.settings.data import DataFiles, TokenizerConfig, resumed_null_vocab_size
from megatron.core.config.settings.run import RequestedRun
from megatron.core.config.settings.vision import VisionConfig
from megatron.core.dist_checkpointing.checkpoint_folders import (
    CheckpointError,
    checkpoint_model_settings,
    newest_iteration,
    saved_run_settings,
)
from megatron.training.launch.launch_info import install_interrupt_excepthook, read_launch_info

if TYPE_CHECKING:
    from megatron.training.checked_run import CheckedRun

# What a checkpoint says of images that speaks of how its run trained, not of its network.
_OF_THE_RUN = {
    "recompute_vision",
    *(name for name, role in field_resume_roles(VisionConfig).items() if role == "training"),
}
Provider = Callable[[argparse.ArgumentParser], Any]


HEAD_START = 5.0  # seconds that ranks which say nothing give the one that does


def make_parser(extra: Sequence[type] = (), provider: Provider | None = None) -> argparse.ArgumentParser:
    """Build an entry script's argument parser. extra: the script's config classes; provider: adds arguments by hand."""
    parser = argparse.ArgumentParser(
        prog=command_name(),
        allow_abbrev=False,
        exit_on_error=False,
        add_help=False,
        usage="%(prog)s [flags]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Train a transformer. Flags are Megatron's; they come in groups.",
    )
    parser.add_argument("-h", "--help", action=HelpAction)
    parser.add_argument("--yaml-cfg", metavar="FILE", help="flags as a YAML mapping; the command line overrides it")
    for config_class in (RequestedRun, *extra):
        add_config_arguments(parser, config_class)
    if provider is not None:
        provider(parser)
    accept_values_with_dashes(parser)
    return parser


WHERE_TO_LOOK = (
    "--help WORD explains the flags that match (--help num-layers), --help all every one; docs/rules.md has the rules"
)


def parse_args(
    argv: Sequence[str] | None = None,
    *,
    defaults: Mapping[str, Any] | None = None,
    extra: Sequence[type] = (),
    provider: Provider | None = None,
    world_size: int = 1,
    speaks: bool = True,
    reads_data: DataFiles = "none",
    own_problems: Callable[[argparse.Namespace, int], Iterable[str]] = lambda args, world_size: (),
) -> CheckedRun:
    """Parse and check the command line; print what is wrong and exit with code 2 if the run cannot start.
    defaults: the script's own. world_size: ranks that will run. speaks: whether this rank prints errors; those of files
    and machine are printed by one rank of each machine. reads_data: see `preflight`. own_problems: (namespace, number
    of ranks) -> what is wrong with the script's own flags, a line each.
    """
    install_interrupt_excepthook()
    try:
        args = parse_args_unchecked(
            sys.argv[1:] if argv is None else list(argv), defaults=defaults, extra=extra, provider=provider
        )
        from megatron.cli.preflight import check_arguments  # needs numpy, which --help does not wait for

        checked = check_arguments(args, world_size, reads_data=reads_data, own_problems=own_problems)
        place = read_launch_info()
        speaks = speaks or place.rank > 0 == place.local_rank and checked.has_local_problems
        raise_config_error_if(line for _, line in checked.problems)
    except ConfigError as error:
        if speaks:
            sys.stderr.write(with_command_names(f"ConfigError: {error}\n{WHERE_TO_LOOK}\n", command_name()))
        elif world_size > 1:
            # A launcher ends all ranks when the first of them ends: let that be the one that says why.
            time.sleep(HEAD_START)
        raise SystemExit(2) from None
    return checked


def parse_args_unchecked(
    argv: Sequence[str],
    *,
    defaults: Mapping[str, Any] | None = None,
    extra: Sequence[type] = (),
    provider: Provider | None = None,
) -> argparse.Namespace:
    """Parse the command line, also of old flags and --yaml-cfg, without checking rules between flags. The namespace has
    `messages` about old flags, `problems` found so far, and `origins`: setting -> where its value came from (script,
    file, command line, checkpoint), without our defaults.
    """
    parser = make_parser(extra, provider)
    parser.set_defaults(**(defaults or {}))
    known = {word for action in parser._actions for word in action.option_strings}
    words, messages, problems = translate_legacy_flags(_expand_yaml_cfg(argv), known)
    args, unknown = _parse_collecting_problems(parser, words, problems)
    args.origins = _setting_origins(parser, argv, words, defaults or {})
    problems += _unknown_flag_problems(unknown, known) or _stray_word_problems(parser, words, unknown)
    try:
        if args.use_checkpoint_args:
            _apply_checkpoint_args(args)
        problems += _adopt_adapter_settings(args)
        if args.tokenizer_type == "NullTokenizer" and (args.load or args.pretrained_checkpoint):
            messages += _convert_old_null_vocab_size(args)
        if args.load and not args.finetune and "calculate_per_token_loss" not in args.origins:
            _adopt_loss_averaging(args)
    except CheckpointError as error:
        problems.append(str(error))
    args.messages, args.problems = messages, problems
    return args


def _unknown_flag_problems(words: Sequence[str], known: Collection[str]) -> list[str]:
    """A sentence for each word that looks like a flag and is none."""
    problems = []
    for word in words:
        if word.startswith("--"):
            near = similar_flags(word.partition("=")[0], known)
            advice = f"did you mean {' or '.join(near)}?" if near else "leave it out, or see --help"
            problems.append(f"{word} is not a flag; {advice}")
    return problems


def missing_hybrid_pattern_problems(args: Any, world_size: int) -> list[str]:
    """Why the flags of a run (args: their namespace) are not those of a hybrid, a line. Megatron's pretrain_mamba.py made every layer Mamba-2 without a pattern."""
    if (
        args.hybrid_layer_pattern is not None
        or args.hybrid_attention_ratio
        or args.hybrid_mlp_ratio
        or args.experimental_attention_variant
        or args.parallel_mamba
        or args.use_checkpoint_args
    ):
        return []
    layers = args.num_layers or 0
    pure = f" ({'M' * layers} for Mamba-2 in all of --num-layers {layers})" if 0 < layers <= 100 else ""
    return [
        f"no flag says which layers have a state: give --hybrid-layer-pattern{pure}, or --experimental-attention-variant; pretrain_gpt.py trains a "
        "GPT"
    ]


def _parse_collecting_problems(
    parser: argparse.ArgumentParser, words: Sequence[str], problems: list[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Parse: (namespace, unknown words). A flag with a bad value is added to `problems` and left out."""
    left = list(words)
    while True:
        try:
            return parser.parse_known_args(left)
        except argparse.ArgumentError as error:
            message = _reword_argparse_error(parser, left, error)
            if not any(problem.startswith(f"{message.partition(':')[0]}: ") for problem in problems):
                problems.append(message)
            shorter = _without_flags(left, (error.argument_name or "").split("/"))
            if len(shorter) == len(left):
                raise_config_error_if(problems)
            left = shorter


def _reword_argparse_error(parser: argparse.ArgumentParser, words: Sequence[str], error: argparse.ArgumentError) -> str:
    """Reword argparse's error: the flag as it was typed, the value given, and what is allowed."""
    names = (error.argument_name or "").split("/")
    flag = next((word.partition("=")[0] for word in words if word.partition("=")[0] in names), names[0])
    action = next((action for action in parser._actions if flag in action.option_strings), None)
    choices = list(map(str, action.choices)) if action is not None and action.choices else []
    given = re.match(r"invalid (?:choice|\w+ value): '?(.*?)'?(?: \(choose from .*\))?$", error.message, re.DOTALL)
    if given and choices:
        near = difflib.get_close_matches(given[1], choices, n=1)
        return f"{flag} {given[1]}: choose {' or '.join(filter(None, [', '.join(choices[:-1]), choices[-1]]))}" + (
            f"; did you mean {near[0]}?" if near else ""
        )
    kinds: dict[Any, str] = {int: "a whole number", float: "a number"}
    if given:
        return f"{flag} {given[1]}: give {kinds.get(getattr(action, 'type', None), 'another value')}"
    if error.message.startswith("expected"):
        return f"{flag} has no value; give one" + (f" of {', '.join(choices)}" if choices else "")
    if error.message.startswith("ignored explicit argument"):
        return f"{flag} is a switch, and takes no value; write {flag} or --no-{flag[2:].removeprefix('no-')} alone"
    return f"{flag}: {error.message}"


def _stray_word_problems(parser: argparse.ArgumentParser, words: Sequence[str], left: Sequence[str]) -> list[str]:
    """Return a line for each word that belongs to no flag, or to a value that lacks its quotes."""
    problems = []
    texts = [one.option_strings for one in parser._actions if (one.nargs, one.type, one.choices) == (None, str, None)]
    single, rest = {name for names in texts for name in names}, list(left)
    starts = [place for place, word in enumerate(words) if word.startswith("--")]
    for start, end in pairwise([*starts, len(words)]):
        flag, values = words[start], words[start + 1 : end]
        if flag in single and len(values) > 1 and all(word in rest for word in values[1:]):
            problems.append(
                f"{flag} takes one value, and {' '.join(values)} are {len(values)}; put quotes around it: "
                f"{flag} '{' '.join(values)}'"
            )
            for word in values[1:]:
                rest.remove(word)
    return [*problems, *(f"{word!r} belongs to no flag; leave it out" for word in rest)]


def _setting_origins(
    parser: argparse.ArgumentParser, argv: Sequence[str], words: Sequence[str], defaults: Mapping[str, Any]
) -> dict[str, str]:
    """Return setting -> script, file or command line. words: all flags as argparse sees them, also of a file."""
    settings = {word: action.dest for action in parser._actions for word in action.option_strings}

    def settings_set_by_argv(words: Sequence[str]) -> list[str]:
        names = (word.partition("=")[0] for word in words)
        return [settings[name] for name in names if name in settings]

    return (
        dict.fromkeys(defaults, "script")
        | dict.fromkeys(settings_set_by_argv(words), "file")
        | dict.fromkeys(settings_set_by_argv(translate_legacy_flags(argv, settings.keys())[0]), "command line")
    )


def _without_flags(words: Sequence[str], names: Sequence[str]) -> list[str]:
    """The words without these flags and their values."""
    remaining, dropping = [], False
    for word in words:
        if word.startswith("--"):
            dropping = word.partition("=")[0] in names
        if not dropping:
            remaining.append(word)
    return remaining


def _expand_yaml_cfg(argv: Sequence[str]) -> list[str]:
    """Return argv with the mapping of --yaml-cfg written out as flags before the others."""
    for place, word in enumerate(argv):
        name, _, value = word.partition("=")
        if name == "--yaml-cfg":
            path = value or (argv[place + 1] if place + 1 < len(argv) else "")
            rest = [*argv[:place], *argv[place + (1 if value else 2) :]]
            return [*_read_yaml_as_flags(path), *rest]
    return list(argv)


def _read_yaml_as_flags(path: str) -> list[str]:
    """Read a YAML file as command-line words; `ConfigError` if it cannot be read or holds no mapping."""
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--yaml-cfg {path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(
            f"--yaml-cfg {path} holds a {type(content).__name__}; it must be a mapping of flags to values"
        )
    return [word for name, value in _leaf_names_and_values(content) for word in _setting_to_argv(str(name), value)]


def _leaf_names_and_values(content: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return (name, value) pairs of a nested mapping; the names of inner mappings are dropped."""
    values: list[tuple[str, Any]] = []
    for name, value in content.items():
        values += _leaf_names_and_values(value) if isinstance(value, Mapping) else [(name, value)]
    return values


def _setting_to_argv(name: str, value: Any) -> list[str]:
    word = flag_name(name.lstrip("-"))
    if value is None:
        return []
    if isinstance(value, bool):
        return [word] if value else ["--no-" + word[2:]]
    return [word, *(str(v) for v in (value if isinstance(value, list) else [value]))]


def _apply_checkpoint_args(args: argparse.Namespace) -> None:
    """Set model and tokenizer flags to the values of the checkpoint that the run starts from (--use-checkpoint-args).
    Run settings that a checkpoint of another format also holds are taken where the command line says nothing.
    """
    settings = _checkpoint_settings(args)
    if settings is None:
        return
    fields, tokenizer, adapter = (
        {field.name for field, _ in flag_fields(config_class)}
        for config_class in (RequestedRun, TokenizerConfig, AdapterConfig)
    )
    if not args.use_tokenizer_model_from_checkpoint_args:
        fields -= tokenizer
    values, beside = settings
    if values.get("lora_rank") is None:  # a base says nothing of the adapters that are put beside it
        fields -= adapter
    fields -= _OF_THE_RUN
    given = {name for name, origin in args.origins.items() if origin != "script"}
    given |= tokenizer if tokenizer & given else set()
    for name, value in {**{name: value for name, value in beside.items() if name not in given}, **values}.items():
        if name in fields:
            setattr(args, name, value)
            args.origins[name] = "checkpoint"


def _adopt_adapter_settings(args: argparse.Namespace) -> list[str]:
    """Set LoRA flags not given to the values of --adapter; return a message for given ones that contradict it."""
    if not args.adapter or not (args.load or args.pretrained_checkpoint):
        return []
    # Needs torch, which no other command line waits for.
    from megatron.training.checkpoint.adapters import adapter_config_of

    model = config_from_namespace(RequestedRun, args).model.resolve()
    mine = config_to_flat_dict(model.adapter)
    given = {name: getattr(model.adapter, name) for name in mine if args.origins.get(name) in ("command line", "file")}
    theirs, fits = adapter_config_of(args.adapter, model, args.pretrained_checkpoint, given)
    for name, value in config_to_flat_dict(theirs).items():
        if name not in given:
            setattr(args, name, value)
            args.origins[name] = "checkpoint"
    if fits:
        return []
    contradicts = [flag_name(name) for name in given if name not in ("lora_dropout", "lora_modules_to_save", "freeze")]
    return [f"{', '.join(contradicts)}: --adapter {args.adapter} says otherwise; leave out what it says"]


def _checkpoint_settings(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return (settings, further run settings) of the checkpoint that the run starts from. None without one and before
    the first start of a run whose --load is its --save; `CheckpointError` if it is missing otherwise.
    """
    for path, step in ((args.load, args.ckpt_step), (args.pretrained_checkpoint, None)):
        if not path:
            continue
        if newest_iteration(path, step) is not None:
            return checkpoint_model_settings(path, step), {}
        from megatron.training.checkpoint.foreign_settings import foreign_checkpoint_settings  # needs torch, as above

        settings = foreign_checkpoint_settings(path, step)
        if settings is not None:
            return settings
    missing = args.pretrained_checkpoint or (args.load if args.load != args.save else None)
    return (checkpoint_model_settings(missing), {}) if missing else None  # raises, and says what is missing


def _adopt_loss_averaging(args: argparse.Namespace) -> None:
    """Set --calculate-per-token-loss to the checkpoint's value; nothing if it does not say."""
    try:
        if newest_iteration(args.load, args.ckpt_step) is not None:
            saved = saved_run_settings(args.load, args.ckpt_step)
        else:
            from megatron.megatron_lm.checkpoint.open import read_megatron_arguments  # needs torch, as above

            saved = read_megatron_arguments(args.load, args.ckpt_step)
    except CheckpointError:
        return  # loading it reports what is wrong
    if isinstance(mean := saved.get("calculate_per_token_loss"), bool):
        args.calculate_per_token_loss, args.origins["calculate_per_token_loss"] = mean, "checkpoint"


def _convert_old_null_vocab_size(args: argparse.Namespace) -> list[str]:
    """Set NullTokenizer's --vocab-size to what it meant when the checkpoint was saved. Return messages for the user."""
    path, step = (args.load, args.ckpt_step) if args.load else (args.pretrained_checkpoint, None)
    try:
        saved = saved_run_settings(path, step)
    except CheckpointError:
        from megatron.training.checkpoint.foreign_settings import foreign_checkpoint_settings  # needs torch, as above

        try:
            saved, _ = foreign_checkpoint_settings(path, step) or ({}, {})
        except CheckpointError:
            return []  # loading it reports what is wrong
    given, args.vocab_size = args.vocab_size, resumed_null_vocab_size(args.vocab_size, saved)
    if args.vocab_size == given:
        return []
    return [
        f"--vocab-size {given} is taken as {args.vocab_size}, which NullTokenizer had when {path} was saved: the end of document, "
        "once an id more, is now the last of --vocab-size"
    ]
