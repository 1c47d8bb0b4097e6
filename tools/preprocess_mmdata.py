#!/usr/bin/env python3
"""Texts and images to a multimodal .bin/.idx pair. The code is in megatron/cli/commands/preprocess_mmdata.py."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(path for path in sys.path if Path(path).resolve() != HERE)]
from megatron.cli.commands.preprocess_mmdata import main

if __name__ == "__main__":
    main()
