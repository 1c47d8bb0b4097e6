"""`--help`: one screen, all flags, or what matches some words."""

from __future__ import annotations

import re

import pytest

from megatron.cli.arguments import make_parser
from megatron.cli.help import COMMON


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code and standard output of a command line."""
    with pytest.raises(SystemExit) as end:
        make_parser().parse_args([*words])
    out, err = capsys.readouterr()
    assert err == ""
    return int(end.value.code or 0), out


def flags_of(text: str) -> set[str]:
    """The flags that a help lists."""
    return set(re.findall(r"^  (?:-h[^,]*, )?(--[\w-]+)", text, re.M))


def test_the_first_screen_is_one_line_of_usage_and_the_common_flags(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = printed(capsys, "--help")
    assert code == 0 and text.startswith("usage: ") and text.splitlines()[1] == "" and len(text.splitlines()) < 80
    assert flags_of(text) == {"--" + name.replace("_", "-") for name in COMMON} and len(COMMON) == 20
    assert "--help all" in text and "Mixture of experts (" in text


def test_words_choose_groups_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = printed(capsys, "--num-layers", "4", "--help", "learning", "rate")
    assert (
        code == 0
        and {"--lr-warmup-iters", "--decoupled-lr"} <= flags_of(text)
        and "--hidden-size" not in flags_of(text)
    )
    assert "--moe-router-topk" in flags_of(printed(capsys, "--help", "moe")[1])
    code, text = printed(capsys, "-h", "unheard-of")
    assert code == 1 and "nothing speaks of unheard-of" in text and "--help all" in text


def test_all_is_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = printed(capsys, "--help", "all")
    assert code == 0 and len(flags_of(text)) > 350 and text.count("usage: ") == 1 and "[--" not in text.splitlines()[0]
