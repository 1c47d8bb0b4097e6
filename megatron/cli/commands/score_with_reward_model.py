"""Score texts with a reward model: JSON lines in, the same lines with their scores out.

    megatron score-with-reward-model --load runs/reward --input texts.jsonl --output scored.jsonl

A line holds "text"; or "prompt" and "completion"; or "chosen" and "rejected", with or without a "prompt". Each is text, or a list of
messages. It gets "score", or "chosen_score" and "rejected_score"; of pairs it is told how often the chosen answer is above.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.cli.tool_parser import ToolArgumentParser
from megatron.core.config.flags.declare import ConfigError
from megatron.core.datasets.storage import DataError, atomic_file, read_text_lines
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.evaluation.likelihood import EvaluationBatchLimits
from megatron.evaluation.reward_model import RewardModel
from megatron.training.launch.launch_info import install_interrupt_excepthook

FORMS = {"text": "score", "completion": "score", "chosen": "chosen_score", "rejected": "rejected_score"}


def parse_line_to_score(line: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parse one line of the input, a JSON object with "text", "completion", or "chosen" and "rejected".
    Return it, and for each score it gets ("score", or "chosen_score" and "rejected_score") what is scored, a text or a
    list of messages, with the row's "prompt" in front (not of "text"). Raises `DataError` that says what is wrong with
    the line.
    """
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"not JSON: {error}") from error
    names = [name for name in FORMS if isinstance(row, Mapping) and name in row]
    if names not in (["text"], ["completion"], ["chosen", "rejected"]):
        raise DataError('neither "text", nor "completion", nor "chosen" and "rejected"')
    prompt, texts = row.get("prompt") if names != ["text"] else None, dict[str, Any]()
    for name in names:
        if not isinstance(row[name], (str, list)) or prompt is not None and type(prompt) is not type(row[name]):
            raise DataError(f'"{name}" and its prompt are both text, or both lists of messages')
        texts[FORMS[name]] = row[name] if prompt is None else prompt + row[name]
    return row, texts


def score_and_write_lines(args: argparse.Namespace) -> str:
    """Score all lines of the input, and write them with their scores. Return what was done, in words."""
    rows = []
    for number, line in enumerate(read_text_lines(args.input), 1):
        if line.strip():
            try:
                rows.append(parse_line_to_score(line))
            except DataError as error:
                raise DataError(f"{args.input}, line {number}: {error}") from error
    model = RewardModel.load(args.load, template=args.chat_format, dtype=args.dtype)
    scores = iter(
        model.score([text for _, texts in rows for text in texts.values()], size=EvaluationBatchLimits(args.batch_size))
    )
    above, pairs = 0, 0
    with atomic_file(args.output) as out:
        for row, texts in rows:
            values = {name: next(scores) for name in texts}
            out.write(json.dumps({**row, **values}).encode() + b"\n")
            if len(values) == 2:
                pairs, above = pairs + 1, above + (values["chosen_score"] > values["rejected_score"])
    message = f"; of {pairs} pairs, {above} have the chosen answer above" if pairs else ""
    return f"{args.output}: {len(rows)} lines with scores{message}"


def main(arguments: list[str] | None = None) -> None:
    """Score, and print what was done."""
    install_interrupt_excepthook()
    parser = ToolArgumentParser(description=__doc__)
    parser.add_argument(
        "--load", required=True, metavar="DIR", help="a reward model: a run's --save, or a folder of Hugging Face's"
    )
    parser.add_argument("--input", required=True, type=Path, metavar="FILE", help="JSON lines to score")
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="where they go with their scores")
    parser.add_argument(
        "--chat-format", default="tokenizer", metavar="NAME", help="how conversations are written (default: tokenizer)"
    )
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="texts at a time (default: 16)")
    parser.add_argument("--dtype", default="auto", help="format of the weights (default: as they are)")
    args = parser.parse_args(arguments)
    try:
        print(score_and_write_lines(args))
    except (CheckpointError, ConfigError, DataError, OSError) as error:
        sys.exit(f"score.py: {error}")
