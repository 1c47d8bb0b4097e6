#!/usr/bin/env python3
"""What is in .bin/.idx pairs. The code is in megatron/cli/commands/inspect_dataset.py."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(path for path in sys.path if Path(path).resolve() != HERE)]
from megatron.cli.commands.inspect_dataset import main

if __name__ == "__main__":
    main()
