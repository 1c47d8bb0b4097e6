"""The names under which an installation has the scripts of a clone.

    tools/plan.py                       megatron-plan
    tools/checkpoint/convert.py         megatron-checkpoint-convert
    torchrun [...] pretrain_gpt.py      torchrun --no-python [...] megatron-pretrain-gpt

Help and messages name the scripts; a program that was started as a command shows them with `with_command_names`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

_SCRIPT = re.compile(r"(?:\bpython )?\b(?:tools/)?((?:checkpoint/|tasks/)?\w+)\.py\b")
_ENTRIES = re.compile(r"(pretrain_\w+|finetune|train_rl)\.py")
_TORCHRUN = re.compile(r"\btorchrun(?= (?:[^|&;\n]*? )?megatron-)")


def command_name(words: Sequence[str] = tuple(sys.orig_argv)) -> str | None:
    """Return the name of the command that was started; None for a script of a clone. words: of the process."""
    names = (Path(word).name for word in words[:3])  # an interpreter, an option of it, and the command
    return next((name for name in names if name.startswith("megatron-")), None)


def with_command_names(text: str, command: str | None) -> str:
    """Return a text with the commands of an installation for the scripts that it names. command: of `command_name`."""
    if command is None:
        return text
    return _TORCHRUN.sub("torchrun --no-python", _SCRIPT.sub(_command_of_match, text))


def _command_of_match(match: re.Match[str]) -> str:
    """Return the command of a script that a text names; other files stay as they are."""
    name, whole = match[1], match[0]
    if name == "tasks/main":
        return "megatron-tasks"
    if "tools/" not in whole and not _ENTRIES.fullmatch(f"{name}.py"):
        return whole
    return "megatron-" + name.replace("/", "-").replace("_", "-")
