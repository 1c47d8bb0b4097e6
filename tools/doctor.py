#!/usr/bin/env python3
"""Examine the machines of a run before it is started. The code is in megatron/cli/commands/doctor.py."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(path for path in sys.path if Path(path).resolve() != HERE)]
from megatron.cli.commands.doctor import main

if __name__ == "__main__":
    main()
