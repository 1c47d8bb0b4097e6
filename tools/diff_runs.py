#!/usr/bin/env python3
"""Compare two runs by their run logs. The code is in megatron/cli/commands/diff_runs.py."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(path for path in sys.path if Path(path).resolve() != HERE)]
from megatron.cli.commands.diff_runs import main

if __name__ == "__main__":
    main()
