#!/usr/bin/env python3
"""Continue every prompt of a file. The code is in megatron/cli/commands/generate.py."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(path for path in sys.path if Path(path).resolve() != HERE)]
from megatron.cli.commands.generate import main

if __name__ == "__main__":
    main()
