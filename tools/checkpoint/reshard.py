#!/usr/bin/env python3
"""Rewrite a checkpoint. The code is in megatron/cli/commands/checkpoint/reshard.py."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parents[1]), *(path for path in sys.path if Path(path).resolve() != HERE)]
from megatron.cli.commands.checkpoint.reshard import main

if __name__ == "__main__":
    main()
