#!/usr/bin/env python3
"""Score texts with a reward model. The code is in megatron/cli/commands/score_with_reward_model.py."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(path for path in sys.path if Path(path).resolve() != HERE)]
from megatron.cli.commands.score_with_reward_model import main

if __name__ == "__main__":
    main()
