#!/usr/bin/env python3
"""Join .bin/.idx pairs into one, in order. The code is in megatron/cli/commands/merge_datasets.py."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(path for path in sys.path if Path(path).resolve() != HERE)]
from megatron.cli.commands.merge_datasets import main

if __name__ == "__main__":
    main()
