"""The names under which an installation has the entry scripts of a clone.

    pretrain_gpt.py                     megatron pretrain-gpt
    torchrun [...] pretrain_gpt.py      torchrun [...] -m megatron pretrain-gpt

Help and messages name the scripts; a program that was started by its verb shows verbs, with `with_command_names`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

_SCRIPT = re.compile(r"(?:\bpython )?\b(pretrain_\w+|finetune|train_rl|tasks/main)\.py\b")
_TORCHRUN = re.compile(r"(\btorchrun (?:[^|&;\n]*? )?)(?=megatron )")


def command_name(words: Sequence[str] = tuple(sys.orig_argv)) -> str | None:
    """Return the command that was started, `megatron pretrain-gpt`; None for a script of a clone. words: of the process."""
    # An interpreter, its options, the program, and its first word.
    for program, verb in pairwise(words[:5]):
        if Path(program).name == "megatron":
            return f"megatron {verb}"
    return None


def with_command_names(text: str, command: str | None) -> str:
    """Return a text with the verbs of the entry scripts that it names. command: of `command_name`."""
    if command is None:
        return text
    return _TORCHRUN.sub(r"\1-m ", _SCRIPT.sub(_verb_of_match, text))


def _verb_of_match(match: re.Match[str]) -> str:
    return "megatron " + match[1].removesuffix("/main").replace("_", "-")
