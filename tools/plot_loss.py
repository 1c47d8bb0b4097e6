#!/usr/bin/env python3
"""Loss curves of a run, as a picture. The code is in megatron/cli/commands/plot_loss.py."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(path for path in sys.path if Path(path).resolve() != HERE)]
from megatron.cli.commands.plot_loss import main

if __name__ == "__main__":
    main()
