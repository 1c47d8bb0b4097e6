#!/usr/bin/env python3
"""Show what a layout means before anything runs. The code is in megatron/cli/commands/show_layout.py."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(path for path in sys.path if Path(path).resolve() != HERE)]
from megatron.cli.commands.show_layout import main

if __name__ == "__main__":
    main()
