#!/usr/bin/env python3
"""Score answers about images by the definition of a benchmark. The code is in megatron/cli/commands/evaluate_vlm.py."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(path for path in sys.path if Path(path).resolve() != HERE)]
from megatron.cli.commands.evaluate_vlm import main

if __name__ == "__main__":
    main()
