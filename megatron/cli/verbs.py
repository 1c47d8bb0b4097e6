"""`megatron <verb>`: every command by one name. `python -m megatron <verb>` is the same where nothing is installed.

    megatron plan <flags>
    megatron checkpoint convert --load FOLDER --save FOLDER
    torchrun --nproc-per-node 8 -m megatron pretrain-gpt <flags>

A verb is a file of cli/commands, whose `main` it calls, or an entry script. `megatron --help` says of each what the first line of its file
says; files are read for that and not imported, so that help does not wait for torch.
"""

from __future__ import annotations

import difflib
import importlib
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.training.launch.entry_scripts import entry_script_folder, make_entry_scripts_importable

GROUPS: Mapping[str, tuple[str, ...]] = {
    "training": (
        "pretrain-gpt",
        "pretrain-hybrid",
        "pretrain-bert",
        "pretrain-t5",
        "pretrain-vlm",
        "pretrain-vision-classify",
        "finetune",
        "train-rl",
        "tasks",
    ),
    "data": (
        "preprocess-data",
        "preprocess-mmdata",
        "merge-datasets",
        "inspect-dataset",
        "explain-data",
        "tokenizer",
        "unigram-entropy",
    ),
    "before a run": ("check-config", "show-layout", "plan", "check-parity", "doctor"),
    "during and after a run": ("plot-loss", "diff-runs", "replay"),
    "checkpoints": (
        "checkpoint inspect",
        "checkpoint verify",
        "checkpoint diff",
        "checkpoint convert",
        "checkpoint export",
        "checkpoint reshard",
        "checkpoint adapter",
        "checkpoint combine",
        "checkpoint resume-check",
    ),
    "trained models": (
        "generate",
        "generate-text",
        "serve",
        "text-generation-cli",
        "score-with-reward-model",
        "bert-embedding",
        "evaluate-vlm",
    ),
}
VERBS: tuple[str, ...] = tuple(verb for verbs in GROUPS.values() for verb in verbs)
_COMMANDS = Path(__file__).resolve().parent / "commands"
_TASKS = _COMMANDS.parents[1] / "tasks" / "main.py"


def main() -> None:
    """Start the verb that the command line names, or say which there are; exit with 2 if it names none."""
    words = sys.argv[1:]
    if words[:1] in (["-h"], ["--help"]):  # before a verb, it asks for the help of that verb
        words = [*words[1:], words[0]]
    verb = next((verb for verb in VERBS if words[: verb.count(" ") + 1] == verb.split()), None)
    if verb is not None:
        run_verb(verb, words[verb.count(" ") + 1 :])
        return
    named = [word for word in words if word not in ("-h", "--help")]
    if named in ([], ["checkpoint"]):
        sys.stdout.write(help_text("checkpoint " if named else ""))
        return
    text = " ".join(named[: 2 if named[0] == "checkpoint" else 1])
    near = difflib.get_close_matches(text.replace("_", "-"), VERBS, n=1)
    hint = f"did you mean {near[0]}?" if near else "megatron --help lists them"
    sys.stderr.write(f"megatron: {text} is not a verb; {hint}\n")
    raise SystemExit(2)


def run_verb(verb: str, words: Sequence[str]) -> None:
    """Run a verb with these words, as if it were a program of its own; exit with its code."""
    # What parsers show as the program's name.
    sys.argv[:] = [f"megatron {verb}", *words]
    path = verb_file(verb)
    if path.parent == entry_script_folder():
        # Not the function `main`: user scripts like them, and pickled objects, are of a module `__main__`.
        make_entry_scripts_importable()
        runpy.run_module(path.stem, run_name="__main__", alter_sys=True)
        return
    module = ".".join(("megatron", *path.relative_to(_COMMANDS.parents[1]).with_suffix("").parts))
    sys.exit(importlib.import_module(module).main())


def verb_file(verb: str) -> Path:
    """Return the file of a verb."""
    if verb == "tasks":
        return _TASKS
    name = f"{verb.replace(' ', '/').replace('-', '_')}.py"
    return (entry_script_folder() if verb in GROUPS["training"] else _COMMANDS) / name


def verb_sentence(verb: str) -> str:
    """Return what a verb does: the first line of its file's docstring, without how it is called."""
    line = verb_file(verb).read_text(encoding="utf-8").split('"""', 2)[1].splitlines()[0]
    return line.partition(": `torchrun")[0].rstrip(".") + "."


def help_text(prefix: str = "") -> str:
    """Return `megatron --help`: the verbs that begin so, in groups, with a sentence each."""
    lines = [
        f"usage: megatron {prefix}<verb> [options]",
        "",
        "Train transformer models, and work with their data and checkpoints. `python -m megatron` is the same command.",
    ]
    for title, verbs in GROUPS.items():
        chosen = [verb for verb in verbs if verb.startswith(prefix)]
        lines += ["", title, *(f"  {verb:<25} {verb_sentence(verb)}" for verb in chosen)] if chosen else []
    last = "megatron <verb> --help says what each takes. Several ranks: torchrun --nproc-per-node N -m megatron <verb>"
    return "\n".join([*lines, "", last, ""])
