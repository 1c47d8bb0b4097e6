"""Flags of the tasks, beside those of every run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron.core.config.flags.declare import ConfigError, config_from_namespace, flag, raw_flag_values
from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.tokenizers.build import build_tokenizer

ZERO_SHOT = ("WIKITEXT103", "LAMBADA")


@dataclass(frozen=True, slots=True)
class TaskConfig:
    """Task.

    What a model is tested on as it is (WIKITEXT103, LAMBADA), or finetuned for (the others).
    """

    task: (
        Literal[
            "WIKITEXT103", "LAMBADA", "RACE", "MNLI", "QQP", "QNLI", "RTE", "WNLI", "MRPC", "SST-2", "CoLA", "STS-B"
        ]
        | None
    ) = flag(None, "which task")
    train_data: tuple[str, ...] | None = flag(None, "files (RACE: folders) to finetune on", metavar="PATH")
    valid_data: tuple[str, ...] | None = flag(None, "files (RACE: folders) to evaluate on", metavar="PATH")
    epochs: int = flag(0, "times to go through the training data; 0: evaluate only")
    keep_last: bool = flag(False, "train on the last batch of an epoch even if it is not full")
    long_texts: Literal["cut", "refuse"] = flag("cut", "what becomes of texts that are longer than --seq-length")
    output_file: str | None = flag(
        None, "JSON lines of what is predicted for each sample of --valid-data, by the best epoch"
    )
    overlapping_eval: int = flag(32, "WIKITEXT103: tokens by which windows advance; only those are scored anew")
    strict_lambada: bool = flag(False, "LAMBADA: the whole last word must be predicted, not its last token only")


def task_flag_defaults(words: Sequence[str]) -> dict[str, Any]:
    """Return the defaults of a run's flags for the task on the command line.

    How long it trains is set by --epochs alone. Invalid words are reported by the parser, not here.
    """
    given = raw_flag_values(words)
    common = {"finetune": True, "mock_data": True, "eval_iters": 0, "micro_batch_size": 4, "train_iters": 1}
    if given.get("--task") in (None, *ZERO_SHOT):
        return {**common, "tokenizer_type": "GPT2BPETokenizer", "skip_train": True}
    return {
        **common,
        "tokenizer_type": "BertWordPieceLowerCase",
        "architecture": "bert",
        "skip_train": given.get("--epochs") in (None, "0"),
    }


def task_flag_problems(args: Any, world_size: int) -> Iterator[str]:
    """Yield what is wrong with the task's own flags, and what its tokenizer lacks. args: namespace of the whole command line."""
    task = config_from_namespace(TaskConfig, args)
    if args.context_parallel_size > 1 or args.hybrid_context_parallel:
        yield "tasks read every text whole on each rank; leave out --context-parallel-size and --hybrid-context-parallel"
    if not task.valid_data:
        yield f"--task {task.task} needs --valid-data"
    if task.task in ZERO_SHOT:
        return
    if task.epochs and not task.train_data:
        yield f"--epochs {task.epochs} of --task {task.task} need --train-data"
    if not (task.epochs or args.load or args.pretrained_checkpoint):
        yield f"--task {task.task} without --epochs evaluates a finetuned model: give it by --load"
    try:
        lacking = missing_encoder_tokens(build_tokenizer(config_from_namespace(TokenizerConfig, args)))
    except ConfigError:  # which the checks of every run tell
        return
    if lacking:
        yield needed_tokens_text(lacking)


def missing_encoder_tokens(tokenizer: Any) -> list[str]:
    """Return which of the tokens around an encoder's texts a tokenizer does not have: cls, sep, pad."""
    return [name for name in ("cls", "sep", "pad") if getattr(tokenizer, name) is None]


def needed_tokens_text(lacking: Sequence[str]) -> str:
    """Say that a task needs these tokens."""
    return f"this task needs a tokenizer with the tokens {', '.join(lacking)}, as --tokenizer-type BertWordPieceLowerCase has them"
