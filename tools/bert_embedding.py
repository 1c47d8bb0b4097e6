#!/usr/bin/env python3
"""Texts to vectors. The code is in megatron/cli/commands/bert_embedding.py."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(path for path in sys.path if Path(path).resolve() != HERE)]
from megatron.cli.commands.bert_embedding import main

if __name__ == "__main__":
    main()
