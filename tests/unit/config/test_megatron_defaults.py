"""The flags of Megatron's own parser (release 0.19.2) with their defaults, as data, against ours: equal, different for a reason, or answered.

megatron_defaults.json: flag -> [kind, default], read from the parser that `megatron.cli.arguments.add_megatron_arguments` makes. Kinds:
a switch changes its setting when it is given, a bool has both spellings, a value's default is as a user would write it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron.cli.legacy_flags import find_legacy_flag
from megatron.core.config.flags.declare import flag_fields, flag_name, flag_spellings
from megatron.core.config.settings.run import RequestedRun

DATA = json.loads((Path(__file__).parent / "megatron_defaults.json").read_text())
PAGE = Path(__file__).resolve().parents[3] / "docs" / "moving_from_megatron.md"
FIELDS = {word: (field, kind) for field, kind in flag_fields(RequestedRun) for word in flag_spellings(field, kind)}

# Another value, the same function: why.
ALIKE = {
    "--transformer-impl": "names who multiplies, and both are the kernels of this project",
    "--yarn-original-max-position-embeddings": "Megatron fills in 4096",
    "--yarn-beta-fast": "Megatron fills in 32",
    "--yarn-beta-slow": "Megatron fills in 1",
    "--distributed-backend": "auto is nccl on GPUs",
    "--fp4-recipe": "filled in as nvfp4",
    "--dataloader-type": "Megatron fills in single",
    "--cross-entropy-fusion-impl": "auto takes a kernel by the machine, and all compute one loss",
    "--moe-flex-dispatcher-backend": "auto takes the package that is installed",
    "--null-tokenizer-pad-id": "-1 is none",
    "--yarn-correction-range-round-to-int": "Megatron fills in that it rounds",
    "--tiktoken-num-special-tokens": "filled in as 1000 for a vocabulary file of Megatron's",
}


def shown(value: Any) -> str:
    """A default as a user would write it."""
    if value is None or value == ():
        return "none"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def number(text: str) -> float | str:
    """A number, if it is one; 2^32 is one."""
    base, _, power = text.partition("^")
    try:
        return float(base) ** float(power or 1)
    except ValueError:
        return text.lower().strip("[]'") or "none"


def is_default(flag: str) -> bool:
    """Whether leaving the flag out says the same in both."""
    (kind, default), (field, ours) = DATA[flag], FIELDS[flag]
    positive = flag == flag_name(field.name) or flag in field.metadata["also"]
    if kind == "switch":
        return ours is bool and field.default is (not positive)
    if kind == "bool":
        return ours is bool and str(field.default if positive else not field.default) == default
    return number(shown(field.default)) == number(default)


def on_the_page() -> dict[str, str]:
    """Flag -> what the page says of its default, from the table under "Defaults that differ"."""
    text = PAGE.read_text(encoding="utf-8").partition("## Defaults that differ")[2].partition("\n## ")[0]
    return {
        flag: line
        for line in text.splitlines()
        if line.startswith("| `--")
        for flag in re.findall(r"`(--[\w-]+)`", line.split("|")[1])
    }


def test_every_flag_of_megatron_is_a_flag_here_or_is_answered() -> None:
    assert len(DATA) > 800
    read_before = {"--yaml-cfg"}  # whose file is read as flags
    assert [
        flag
        for flag in DATA
        if flag not in FIELDS and flag not in read_before and find_legacy_flag(flag, FIELDS) is None
    ] == []


@pytest.mark.parametrize("flag", sorted(DATA.keys() & FIELDS.keys()))
def test_a_default_is_megatrons_or_differs_for_a_reason(flag: str) -> None:
    said = on_the_page()
    if is_default(flag):
        assert flag not in ALIKE and flag not in said, f"{flag} has Megatron's default: take it from the list"
    else:
        assert (flag in ALIKE) != (flag in said), (
            f"{flag}: {shown(FIELDS[flag][0].default)} here, {DATA[flag][1]} there; say why in docs or ALIKE"
        )


def test_the_page_names_no_default_that_is_not_there() -> None:
    assert len(on_the_page()) > 5 and on_the_page().keys() <= DATA.keys() & FIELDS.keys()
