"""Names of before `megatron <verb>`, for one release: each says its verb on standard error, and runs it.

megatron checkpoint diff A B
megatron-checkpoint-diff A B              megatron checkpoint diff A B
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from megatron.cli.verbs import run_verb
from megatron.training.launch.launch_info import read_launch_info

# Verbs that have another name than the script had.
_RENAMED: Mapping[str, str] = {
    "score": "score-with-reward-model",
    "preprocess": "preprocess-data",
    "run-text-generation-server": "serve",
}


def verb_of_former_name(program: str) -> str:
    """Return the verb of a script's path, or of an installed command."""
    path = Path(program)
    name = path.stem.removeprefix("megatron-").replace("_", "-")
    if path.parent.name == "checkpoint" or name.startswith("checkpoint-"):
        return f"checkpoint {name.removeprefix('checkpoint-')}"
    return _RENAMED.get(name, name)


def main() -> None:
    """Run the verb of the program that was started."""
    verb = verb_of_former_name(sys.argv[0])
    if read_launch_info().rank == 0:
        sys.stderr.write(
            f"note: the next release has no {Path(sys.argv[0]).name}; use `megatron {verb}`, in a clone `python -m megatron {verb}`\n"
        )
    run_verb(verb, sys.argv[1:])
