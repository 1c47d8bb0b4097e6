#!/usr/bin/env python3
"""Whether a run that is killed and resumed goes on alike. The code is in megatron/cli/commands/checkpoint/resume_check.py."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parents[1]), *(path for path in sys.path if Path(path).resolve() != HERE)]
from megatron.cli.commands.checkpoint.resume_check import main

if __name__ == "__main__":
    main()
