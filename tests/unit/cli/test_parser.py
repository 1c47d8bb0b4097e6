"""The parser that tools share: one line of usage, and errors that say where to look."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.cli.tool_parser import ToolArgumentParser

TOOLS = Path(__file__).resolve().parents[3] / "megatron" / "tools"


@pytest.fixture
def parser() -> ToolArgumentParser:
    made = ToolArgumentParser(prog="tool", description="What it does.")
    made.add_argument("folder")
    made.add_argument("--load", metavar="DIR", required=True)
    made.add_argument("--kind", choices=("a", "b"), help="50 %% of them")
    return made


def test_usage_is_one_line_with_what_must_be_given(parser: ToolArgumentParser) -> None:
    assert parser.format_help().splitlines()[:3] == ["usage: tool FOLDER --load DIR [options]", "", "What it does."]


def test_an_error_ends_with_where_to_look(parser: ToolArgumentParser, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parser.parse_args(["x", "--load", "y", "--kind", "c"])
    lines = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and "invalid choice: 'c'" in lines[1]
    assert lines[-1] == "--help says what each option takes"


def test_every_tool_has_this_parser() -> None:
    files = [path for path in TOOLS.rglob("*.py") if path.name != "parser.py"]
    assert [path.name for path in files if "argparse.ArgumentParser(" in path.read_text()] == []
