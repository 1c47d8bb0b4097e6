"""Continue a text with a checkpoint of any layout and format, in one process.

megatron generate-text --load runs/quickstart/checkpoints --prompt "The state of the union is"
"""

from __future__ import annotations

import argparse
import logging
import sys

from megatron.cli.tool_parser import (
    ToolArgumentParser,
    add_checkpoint_options,
    add_sampling_options,
    add_tokenizer_options,
    exit_on,
    fill_sampling_defaults,
    num_tokens_or_default,
)
from megatron.core.config.flags.declare import ConfigError
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.inference.engine import Engine
from megatron.inference.generate import GenerationFailed, generate_texts
from megatron.inference.sampling import SamplingParams
from megatron.training.checkpoint.inference_model import GPT, load_network, read_request_defaults
from megatron.training.launch.launch_info import install_interrupt_excepthook

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # of options and generation_config.json
TOKENIZER = ("tokenizer_type", "vocab_file", "merge_file", "tokenizer_model")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = ToolArgumentParser(description=__doc__, allow_abbrev=True)
    what = add_checkpoint_options(parser, "what to continue")
    what.add_argument("--prompt", action="append", required=True, metavar="TEXT", help="may be given several times")
    add_sampling_options(parser.add_argument_group("how"), "seed of the draws")
    add_tokenizer_options(parser, TOKENIZER)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Load the network, and print each prompt with its continuation."""
    install_interrupt_excepthook()
    given = parse_arguments(argv)
    logging.basicConfig(level=logging.WARNING)
    with exit_on(ConfigError, CheckpointError, GenerationFailed):
        changed = {name: value for name in TOKENIZER if (value := getattr(given, name)) is not None}
        fill_sampling_defaults(
            given, read_request_defaults(given.load, given.generation_config, step=given.ckpt_step, tokenizer=changed)
        )
        loaded = load_network(given.load, GPT, step=given.ckpt_step, tokenizer=changed)
        settings = {name: getattr(given, name, None) for name in SAMPLING}
        sampling = SamplingParams(**{name: value for name, value in settings.items() if value is not None})
        engine = Engine(loaded.stages, loaded.tokenizer)
        num_tokens = num_tokens_or_default(given, None, engine.max_length)
        texts = generate_texts(engine, given.prompt, num_tokens=num_tokens, sampling=sampling, seed=given.seed)
    for text in texts:
        sys.stdout.write(text + "\n")
