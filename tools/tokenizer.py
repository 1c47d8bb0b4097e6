#!/usr/bin/env python3
"""Train, check and try tokenizers. The code is in megatron/cli/commands/tokenizer.py."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(path for path in sys.path if Path(path).resolve() != HERE)]
from megatron.cli.commands.tokenizer import main

if __name__ == "__main__":
    sys.exit(main())
