#!/usr/bin/env python3
"""Text to token files. The code is in megatron/cli/commands/preprocess_data.py."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(path for path in sys.path if Path(path).resolve() != HERE)]
from megatron.cli.commands.preprocess_data import main

if __name__ == "__main__":
    main()
