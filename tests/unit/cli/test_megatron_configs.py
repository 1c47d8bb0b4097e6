"""Command lines of Megatron-LM's functional tests: those that its own validation accepts start here, and all others get an answer.

megatron_configs.json: 171 of them (main, August 2026) as data: script, GPUs, flag -> value, and whether Megatron accepts it (null: the
entry is another, and was not asked). Its ${...} are placeholders.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.config.flags.declare import flag_fields, flag_spellings
from megatron.core.config.settings.run import RequestedRun
from megatron.plan.command import parse_training_command

CONFIGS = json.loads((Path(__file__).parent / "megatron_configs.json").read_text())["configs"]
SEVERAL = {
    word for field, kind in flag_fields(RequestedRun) for word in flag_spellings(field, kind) if "tuple" in str(kind)
}
# What the accepted ones ask for that is not built: word of the answer -> how many command lines.
NOT_BUILT = {"(DSA)": 1, "muP": 1, "Megatron's own sharding": 1, "--cuda-graph-impl local": 2}


def words(args: Mapping[str, Any]) -> list[str]:
    """The command line of a configuration. Lists may stand as "[a b]", and a value with spaces is one word unless the flag takes several."""
    found: list[str] = []
    for flag, value in args.items():
        if (
            value is False or value is None or flag == "--use-checkpoint-args"
        ):  # which asks for a checkpoint that is not here
            continue
        text = str(value)
        if isinstance(value, list):
            found += [flag, *map(str, value)]
        elif value is True:
            found.append(flag)
        elif re.fullmatch(r"\[[\w ]+\]", text):
            found += [flag, *text[1:-1].split()]
        else:
            found += [flag, *(text.split() if flag in SEVERAL or flag == "--data-path" else [text])]
    return found


def answer(config: Mapping[str, Any]) -> list[str]:
    """What keeps the command line from starting, a sentence each."""
    script = config["script"].rpartition("/")[2]
    command = parse_training_command(["torchrun", f"--nproc_per_node={config['gpus']}", script, *words(config["args"])])
    problems = list(command.unread)
    if command.setting:
        problems += dataclasses.replace(command.setting, whole=True, device="cuda").find_broken_rules()
    return [problem.says for problem in problems]


def test_what_megatron_accepts_starts_here_unless_it_needs_what_is_not_built() -> None:
    accepted = [config for config in CONFIGS if config["accepted_upstream"] is True]
    refused = {config["case"]: " ".join(said) for config in accepted if (said := answer(config))}
    found = {word: sum(word in said for said in refused.values()) for word in NOT_BUILT}
    unexplained = {case: said for case, said in refused.items() if not any(word in said for word in NOT_BUILT)}
    assert (len(CONFIGS), len(accepted)) == (171, 112) and unexplained == {}
    assert found == NOT_BUILT and len(refused) == 5, refused


def test_every_other_one_is_answered_in_sentences_that_name_the_way_out() -> None:
    others = [config for config in CONFIGS if config["accepted_upstream"] is not True]
    answers = [(config["case"], answer(config)) for config in others]
    # Five start here, which Megatron refuses or was not tried with.
    assert len(others) == 59 and sum(not said for _, said in answers) == 5
    for case, said in answers:
        for line in said:
            assert len(line.split()) > 5 and "Traceback" not in line and "invalid choice" not in line, (case, line)
            assert re.search(r"[;:,]|leave|choose|give|use|not built|out of scope|instead|start", line), (case, line)
