"""Language models scored as they are: perplexity of a text (WIKITEXT103), and the last word of passages (LAMBADA).

Windows of a text all have one length, and the passes over the stages are those of evaluation in training. Passages have lengths of
their own; they are asked as lm-evaluation-harness asks them, in batches of inputs that are about as long. Either way a model of any
layout is scored where it was trained.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron.core.config.flags.declare import ConfigError
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.special_tokens import count_ids_around_text, encode_without_special_tokens
from megatron.core.datasets.storage import split_text_lines
from megatron.core.models.decoders import build_decoder
from megatron.core.models.gpt import GPTModel
from megatron.core.tokenizers.base import Tokenizer
from megatron.evaluation.likelihood import (
    ContinuationLikelihood,
    EvaluationBatchLimits,
    LoglikelihoodRequest,
    continuation_loglikelihoods,
)
from megatron.tasks.flags import TaskConfig
from megatron.tasks.glue import bad_lines_message, read_utf8_text
from megatron.training.accelerate.compile import LayerCompiler
from megatron.training.checkpoint.checkpointing import Checkpointer
from megatron.training.data.sample_order import stages_read_data
from megatron.training.loader import single_pass_microbatches
from megatron.training.state.batch import Batch, LossFunction, masked_loss_sum
from megatron.training.state.evaluate import evaluate_loss, evaluation_mode
from megatron.training.state.run import RunContext
from megatron.training.state.trainer import Trainer, build_trainer

LARGEST_EXPONENT = 20.0  # a perplexity is not stated beyond e^20


class TokenWindows:
    """Overlapping windows of `length` tokens, each `stride` after the last; every token is scored in one window.

    ids: the text. The first window scores all its labels, the others their last `stride`. fill: id of the padding.
    """

    def __init__(self, ids: Sequence[int], *, length: int, stride: int, fill: int) -> None:
        if not 1 <= stride <= length:
            raise ConfigError(f"--overlapping-eval {stride} is not between 1 and --seq-length {length}")
        if len(ids) < 2:
            raise DataError("the text has fewer than two tokens: there is nothing to predict")
        self.ids, self.length, self.stride, self.fill = np.array(ids, np.int64), length, stride, fill
        self.labels = len(ids) - 1

    def __len__(self) -> int:
        """The number of windows."""
        return 1 + max(0, -(-(self.labels - self.length) // self.stride))

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """tokens, labels, position_ids: int64 [length]; loss_mask: float32 [length], 1 at labels that are scored here."""
        start = index * self.stride
        window = np.full(self.length + 1, self.fill, np.int64)
        held = self.ids[start : start + self.length + 1]
        window[: len(held)] = held
        mask = np.zeros(self.length, np.float32)
        mask[0 if index == 0 else self.length - self.stride : len(held) - 1] = 1.0
        return {
            "tokens": window[:-1],
            "labels": window[1:].copy(),
            "loss_mask": mask,
            "position_ids": np.arange(self.length, dtype=np.int64),
        }


def read_perplexity_text(path: str, tokenizer: Tokenizer, *, length: int, stride: int) -> tuple[TokenWindows, int]:
    """Read a text file for WIKITEXT103: (windows of its detokenized text, number of its words as published)."""
    text = read_utf8_text(path)
    ids = tokenizer.tokenize(detokenize_corpus_text(text, path).strip())
    return TokenWindows(ids, length=length, stride=stride, fill=tokenizer.eod), len(text.strip().split(" "))


def read_lambada_passages(
    paths: Sequence[str], tokenizer: Tokenizer, *, length: int, strict: bool
) -> list[LoglikelihoodRequest]:
    """The passages of LAMBADA, JSON lines with a `text` each, whose last word is to be predicted.

    `DataError` names every line that cannot be used.
    """
    passages, problems = [], []
    for path in paths:
        for number, line in enumerate(split_text_lines(read_utf8_text(path)), 1):
            try:
                passages.append(_lambada_request(line, tokenizer, strict=strict, length=length))
            except ValueError as error:
                problems.append(f"{path}:{number}: {error}")
    if problems or not passages:
        raise DataError(bad_lines_message(f"{len(problems)} lines of the passages cannot be used", problems))
    return passages


def _lambada_request(line: str, tokenizer: Tokenizer, *, strict: bool, length: int) -> LoglikelihoodRequest:
    """Return a passage's context and last word as ids. `ValueError` if it does not fit.

    strict: the whole last word is the continuation, else its last token only.
    """
    content = json.loads(line)
    text = content.get("text") if isinstance(content, dict) else None
    if not isinstance(text, str) or len(text.split()) < 2:
        raise ValueError("expected an object whose `text` has two words or more")
    if strict:
        last = text.split()[-1]
        start = text[: text.rfind(last)].strip()
        beginning, whole, alone = (
            ids.tolist() for ids in encode_without_special_tokens(tokenizer, (start, f"{start} {last}", f" {last}"))
        )
        word = whole[len(beginning) :] if whole[: len(beginning)] == beginning else alone
    else:
        (ids,) = (ids.tolist() for ids in encode_without_special_tokens(tokenizer, (text,)))
        beginning, word = ids[:-1], ids[-1:]
    # A begin of text, where the tokenizer has one.
    beginning = tokenizer.tokenize("1")[: count_ids_around_text(tokenizer)[0]] + beginning
    if not beginning or not word or len(word) > length:
        raise ValueError(
            f"of {len(beginning) + len(word)} tokens, {len(word)} are to be predicted; that fits no window"
        )
    return LoglikelihoodRequest(tuple(beginning), tuple(word))


def perplexity_forward_step(run: RunContext, batches: Iterator[Batch], stage: GPTModel) -> tuple[Tensor, LossFunction]:
    """Run one stage; return its output (of the last the losses [b, s]) and the loss function."""
    batch = next(batches)
    output = stage(ids=batch.tokens, hidden=batch.hidden, labels=batch.labels)
    return output, lambda losses: masked_loss_sum(losses, batch.loss_mask)


def run_zero_shot(run: RunContext, task: TaskConfig) -> dict[str, float]:
    """Score the model of `--load` on every file of `--valid-data`. Returns the last file's results, by name."""
    paths = task.valid_data or ()
    if not paths:
        raise ConfigError(f"--task {task.task} needs --valid-data")
    wiki = task.task == "WIKITEXT103"
    length = run.config.train.seq_length
    trainer = build_trainer(
        run, lambda run, stage: build_decoder(stage, run.layer_build_context), perplexity_forward_step
    )
    if run.config.compilation.compile and wiki:  # passages of many lengths would be as many graphs
        LayerCompiler(trainer)
    if not Checkpointer(trainer).resume():
        raise ConfigError("a zero-shot task scores a trained model: give its checkpoint by --load")
    results: dict[str, float] = {}
    for path in paths:
        if wiki:
            windows, words = read_perplexity_text(path, run.tokenizer, length=length, stride=task.overlapping_eval)
            results = perplexity_metrics(mean_loss_of_token_windows(trainer, windows), windows.labels, words)
        else:
            passages = read_lambada_passages([path], run.tokenizer, length=length, strict=task.strict_lambada)
            results = last_word_metrics(last_word_likelihoods(trainer, passages))
        run.print_rank_0(
            f"{task.task} on {path}: " + " | ".join(f"{name}: {value:.6g}" for name, value in results.items())
        )
    return results


def mean_loss_of_token_windows(trainer: Trainer, windows: TokenWindows) -> float:
    """Return the mean loss over all windows, each seen once, by the trainer's forward step. Collective."""
    run, full = trainer.run, trainer.batches.final_batch_size
    batches = single_pass_microbatches(
        run, windows, split="valid", full_batch=full, reads=stages_read_data(run.config, trainer.specs)
    )
    (score,) = evaluate_loss(trainer, batches, -(-len(windows) // full)).values()
    return score


def perplexity_metrics(loss: float, labels: int, original_words: int) -> dict[str, float]:
    """Return loss, perplexity, adjusted perplexity and token ratio for a mean loss per token.

    The adjusted perplexity divides the whole loss by the words of the published file, so that tokenizers compare.
    """
    ratio = labels / max(1, original_words - 1)
    return {
        "avg loss": loss,
        "ppl": math.exp(min(LARGEST_EXPONENT, loss)),
        "adjusted ppl": math.exp(min(LARGEST_EXPONENT, loss * ratio)),
        "token ratio": ratio,
    }


def last_word_likelihoods(trainer: Trainer, passages: Sequence[LoglikelihoodRequest]) -> list[ContinuationLikelihood]:
    """Return each last word's likelihood, on every rank; long passages lose their first tokens. Collective."""
    train, stages = trainer.run.config.train, [stage for stage in trainer.stages if isinstance(stage, GPTModel)]
    with evaluation_mode(trainer), torch.no_grad():
        return continuation_loglikelihoods(
            stages, passages, max_length=train.seq_length, size=EvaluationBatchLimits(train.micro_batch_size)
        )


def last_word_metrics(answers: Sequence[ContinuationLikelihood]) -> dict[str, float]:
    """Return accuracy and perplexity. ppl: per word, whatever its tokens (lm-evaluation-harness's)."""
    right, count = sum(answer.greedy for answer in answers), len(answers)
    loss = -sum(answer.loglikelihood for answer in answers) / count
    return {
        "number correct": right,
        "total examples": count,
        "avg accuracy": right / count,
        "ppl": math.exp(min(LARGEST_EXPONENT, loss)),
    }


_Rules = tuple[tuple[str, str], ...]

_WIKITEXT: _Rules = (
    (r"s '", "s'"),  # plural possessives
    (r"/' [0-9]/", r"/'[0-9]/"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (r" @\.@ ", "."),  # inside words and numbers
    (" : ", ": "),
    (" ; ", "; "),
    (r" \. ", ". "),
    (" ! ", "! "),
    (r" \? ", "? "),
    (" , ", ", "),
    (r"\(\s*([^\)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (r"{\s*([^}]*?)\s*}", r"{\1}"),
    (r"\"\s*([^\"]*?)\s*\"", r'"\1"'),
    (r"'\s*([^']*?)\s*'", r"'\1'"),
    (r"= = = =", "===="),
    (r"= = =", "==="),
    (r"= =", "=="),
    (" \u00b0 ", "\u00b0"),
    (r" \n", "\n"),
    (r"\n ", "\n"),
    (r" N ", " 1 "),
    (r" 's", "'s"),
)
_PENN_TREEBANK: _Rules = (
    (r" '", "'"),
    (r" \n", "\n"),
    (r"\n ", "\n"),
    (r" n't", "n't"),
    (r" N ", "1 "),
    (r"\$ 1", "$1"),
    (r"# 1", "#1"),  # Megatron's, which takes the space before a number: perplexities compare
)
_BY_NAME: tuple[tuple[str, _Rules], ...] = (("wiki", _WIKITEXT), ("ptb", _PENN_TREEBANK), ("lambada", ()))


def detokenize_corpus_text(text: str, path: str) -> str:
    """Return the text of a corpus that is published with white space around every token as people write it, by the rules
    for its file name; other files as they are.

    The rules are Megatron's and are applied in its order: a space that one of them took away is not there for the next,
    as in "1 , 000 . ; b".
    """
    rules = next((rules for word, rules in _BY_NAME if word in str(path)), ())
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text)
    return text
