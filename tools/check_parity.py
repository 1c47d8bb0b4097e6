#!/usr/bin/env python3
"""Does this layout compute what one rank computes? The code is in megatron/cli/commands/check_parity.py."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(path for path in sys.path if Path(path).resolve() != HERE)]
from megatron.cli.commands.check_parity import main

if __name__ == "__main__":
    main()
