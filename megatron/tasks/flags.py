"""Flags of the tasks, beside those of every run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron.core.config.flags import flag, raw_flag_values

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
