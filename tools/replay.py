#!/usr/bin/env python3
"""Repeat a bad step from its failure dump, on the CPU. The code is in megatron/cli/commands/replay.py."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(path for path in sys.path if Path(path).resolve() != HERE)]
from megatron.cli.commands.replay import main

if __name__ == "__main__":
    sys.exit(main())
