#!/usr/bin/env python3
"""The entropy of a token file's unigrams, in nats per token. The code is in megatron/cli/commands/unigram_entropy.py."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(path for path in sys.path if Path(path).resolve() != HERE)]
from megatron.cli.commands.unigram_entropy import main

if __name__ == "__main__":
    main()
