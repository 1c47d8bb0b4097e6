#!/usr/bin/env python3
"""Ask a text generation server, prompt after prompt. The code is in megatron/cli/commands/text_generation_cli.py."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(path for path in sys.path if Path(path).resolve() != HERE)]
from megatron.cli.commands.text_generation_cli import main

if __name__ == "__main__":
    main()
