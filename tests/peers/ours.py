"""Runs of ours beside the peers': their lines of the log."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pretrain_gpt
from megatron.training.initialize import initialize_megatron
from megatron.training.loop import pretrain
from tests.helpers.programme import checked


def logged_steps(words: Sequence[str], log: Path) -> list[dict[str, Any]]:
    """Run pretrain_gpt with these words of a command line. Returns the lines of its steps, or raises what refused it."""
    logging.getLogger("megatron").handlers.clear()
    run = initialize_megatron(checked([*words, "--log-jsonl", str(log)]))
    try:
        pretrain(
            run,
            pretrain_gpt.datasets_provider,
            pretrain_gpt.model_provider,
            pretrain_gpt.forward_step,
            pretrain_gpt.make_eval_generate_function,
        )
    finally:
        logging.getLogger("megatron").handlers.clear()
    return [line for line in map(json.loads, log.read_text().splitlines()) if line["kind"] == "step"]
