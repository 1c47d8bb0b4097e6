"""The pages are true: every bash block of README.md, CONTRIBUTING.md, docs/ and examples/ runs as it stands, from the root of a checkout.

The blocks of a page run in their order, in a folder that looks like the checkout but keeps what they write to itself.
A block is left out when the line before it says why: `<!-- not run: needs several machines -->`. What it starts exists all the same, and
has the flags that it is given.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.cli.former_names import verb_of_former_name
from megatron.cli.verbs import VERBS, verb_file
from megatron.core.config.flags.declare import flag_fields, flag_spellings
from megatron.core.config.settings.run import RunConfig
from megatron.core.pipeline_parallel.schedules import one_f_one_b, zero_bubble_h1, zero_bubble_v
from megatron.core.pipeline_parallel.timeline import draw_text_timeline, simulate_pipeline_plan
from megatron.plan.command import ENTRIES, parse_training_command

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
)
LONGEST = 900  # seconds after which a block hangs, on the busiest machine
SAYS_THE_SAME = ("planning.md",)  # pages whose outputs depend on nothing but the code
OWN = (".git", ".venv", ".pytest_cache", "runs")  # what the folder of a test does not share with the checkout


@dataclass(frozen=True)
class Block:
    """A fenced block: the line it begins at, its language, its text, and why it is not run ("" if it is)."""

    line: int
    language: str
    text: str
    left_out: str


def blocks(page: str) -> list[Block]:
    """All fenced blocks of a page."""
    found, start, before, lines = [], None, "", page.splitlines()
    for number, line in enumerate(lines, start=1):
        if start is None and line.startswith("```"):
            start, before = number, lines[number - 2].strip() if number > 1 else ""
        elif start is not None and line == "```":
            reason = re.fullmatch(r"<!-- not run: (.+) -->", before)
            found.append(
                Block(
                    start,
                    lines[start - 1][3:].strip(),
                    "\n".join(lines[start : number - 1]),
                    reason[1] if reason else "",
                )
            )
            start = None
    assert start is None, f"the block at line {start} never ends"
    return found


def commands(page: Path) -> list[Block]:
    """The blocks of a page that are to be run."""
    return [
        block for block in blocks(page.read_text(encoding="utf-8")) if block.language == "bash" and not block.left_out
    ]


def words_of_commands(text: str) -> list[list[str]]:
    """The commands of a shell text, each as its words."""
    found: list[list[str]] = []
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = list(lexer)
        while words:
            end = next((place for place, word in enumerate(words) if set(word) <= set(";&|()")), len(words))
            found += [words[:end]] if end else []
            words = words[end + 1 :]
    return found


def verb_of_command(words: list[str]) -> tuple[str, list[str]]:
    """The verb that a command starts, by its name or by a script of tools/, and the words behind it; empty if it starts none."""
    for place, word in enumerate(words):
        rest = words[place + 1 :]
        if re.fullmatch(r"tools/.*\.py", word):
            return verb_of_former_name(word), rest
        if word == "megatron" and words[:place][-1:] in ([], ["-m"]):
            length = 2 if rest[:1] == ["checkpoint"] else 1
            return " ".join(rest[:length]), rest[length:]
    return "", []


def what_is_wrong_with(words: list[str]) -> list[str]:
    """What a command names that there is not: files of this repository, and flags of scripts that train and of tools."""
    words = [word for word in words if "$" not in word and word not in ("...", "--use-checkpoint-args", "--help")]
    if any(Path(word).name in ENTRIES for word in words):
        at = words.index("--yaml-cfg") if "--yaml-cfg" in words else len(words)
        unread = parse_training_command([*words[:at], *words[at + 2 :]]).unread
        return [one.says for one in unread if one.rule == "command-line"]
    scripts = re.findall(r"\b(?:tools|examples|tests|benchmarks|tasks)/[\w/]+\.(?:py|sh)", " ".join(words))
    wrong = [f"{script} is no file" for script in scripts if not (ROOT / script).is_file()]
    verb, rest = verb_of_command(words)
    if verb and not wrong and "--" not in words:
        if verb not in VERBS:
            return [f"{verb} is no verb"]
        text = "".join(
            path.read_text(encoding="utf-8") for path in (verb_file(verb), ROOT / "megatron/cli/tool_parser.py")
        )
        flags = {word.partition("=")[0] for word in rest if word.startswith("--")}
        known = {word for field, kind in flag_fields(RunConfig) for word in flag_spellings(field, kind)}
        wrong += [f"megatron {verb} has no {flag}" for flag in sorted(flags - known) if f'"{flag}"' not in text]
    return wrong


def shown_after(block: Block, page: Path) -> list[str]:
    """What a page says that a command prints, up to what depends on the time that it has."""
    lines = next(
        later for later in blocks(page.read_text(encoding="utf-8")) if later.line > block.line
    ).text.splitlines()
    return lines[
        : next((place for place, line in enumerate(lines) if line.startswith(("...", "What to change"))), len(lines))
    ]


RUN = [page for page in PAGES if commands(page)]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the checkout's files, in which commands may write."""
    for path in ROOT.iterdir():
        if path.name not in OWN:
            (tmp_path / path.name).symlink_to(path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_the_commands_of_a_page_run_as_they_stand(page: Path, checkout: Path) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    for block in commands(page):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text],
            cwd=checkout,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LONGEST,
        )
        assert done.returncode == 0, f"{page.name} line {block.line}:\n{block.text}\n---\n{done.stdout[-3000:]}"
        if page.name in SAYS_THE_SAME:
            missing = [line for line in shown_after(block, page) if line not in done.stdout.splitlines()]
            assert not missing, f"{page.name} line {block.line} no longer says: {missing}\n---\n{done.stdout[-3000:]}"


def test_commands_that_are_not_run_name_what_there_is() -> None:
    wrong = [
        f"{page.relative_to(ROOT)} line {block.line}: {problem}"
        for page in PAGES
        for block in blocks(page.read_text(encoding="utf-8"))
        if block.language == "bash" and block.left_out
        for words in words_of_commands(block.text)
        for problem in what_is_wrong_with(words)
    ]
    assert not wrong, "\n".join(wrong)
    assert what_is_wrong_with(["python", "-m", "megatron", "plan", "--serch"]) == ["megatron plan has no --serch"]
    assert what_is_wrong_with(["megatron", "checkpoint", "plan"]) == ["checkpoint plan is no verb"]
    assert "did you mean --lr" in what_is_wrong_with(["torchrun", "finetune.py", "--lrr", "1"])[0]


def test_a_command_block_says_its_language() -> None:
    starts = re.compile(r"^(\$ )?(python|torchrun|bash|megatron|LAUNCH=\S+) ", re.MULTILINE)
    assert not [
        f"{page.relative_to(ROOT)} line {block.line}"
        for page in PAGES
        for block in blocks(page.read_text(encoding="utf-8"))
        if block.language in ("", "sh", "shell", "console") and starts.search(block.text)
    ]


def test_commands_write_below_runs_only() -> None:
    for page in RUN:
        for block in commands(page):
            written = re.findall(
                r"(?:--output-prefix|--output-dir|--output-file|--output|--picture|--save(?!r|-)|> |mkdir -p) *\"?([\w./$-]+)",
                block.text,
            )
            assert all(path.startswith("runs/docs") for path in written), (
                f"{page.name} line {block.line} writes {written}"
            )


def test_the_schedules_on_the_page_are_those_that_run() -> None:
    drawn = [
        draw_text_timeline(plan, simulate_pipeline_plan(plan)).rstrip().splitlines()
        for plan in (one_f_one_b(4, 6), zero_bubble_h1(4, 6), zero_bubble_v(2, 4))
    ]
    shown = [
        block.text.splitlines()
        for block in blocks((ROOT / "docs" / "parallelism.md").read_text())
        if block.text.startswith("r0")
    ]
    assert [[line.rstrip() for line in text] for text in shown] == [[line.rstrip() for line in text] for text in drawn]


def test_verbs_that_pages_name_are_there() -> None:
    named = re.compile(r"(?:`|-m )megatron ((?:checkpoint )?[a-z][a-z-]+)")
    wrong = [
        f"{page.relative_to(ROOT)}: megatron {verb}"
        for page in PAGES
        for verb in named.findall(page.read_text(encoding="utf-8"))
        if verb not in (*VERBS, "checkpoint")
    ]
    assert not wrong, "\n".join(wrong)


def test_links_lead_to_files() -> None:
    for page in {*PAGES, *ROOT.glob("*.md")}:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_page_is_reachable_from_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")} - {"README.md"}
    assert pages - set(re.findall(r"\]\(([\w/.]+\.md)\)", index)) == set()


def test_the_lines_of_one_step_stand_in_the_files_that_it_names() -> None:
    page = (ROOT / "docs" / "developer" / "one_step.md").read_text(encoding="utf-8")
    numbered = re.split(r"\n\d+\. ", page)[1:]
    assert len(numbered) == 24
    for part in numbered:
        file = re.search(r"\]\(\.\./\.\./([^)]+)\)", part)[1]
        lines = {line.strip() for line in (ROOT / file).read_text(encoding="utf-8").splitlines()}
        quoted = [
            line.strip()
            for block in re.findall(r"```python\n(.*?)```", part, re.S)
            for line in block.splitlines()
            if line.strip()
        ]
        assert [line for line in quoted if line not in lines] == [], file


def test_the_family_on_the_page_is_the_one_in_the_file() -> None:
    file = (ROOT / "megatron/core/families/gpt_oss.py").read_text(encoding="utf-8").splitlines()
    for block in blocks((ROOT / "docs" / "add_a_family.md").read_text(encoding="utf-8")):
        if block.language == "python":
            rest = iter(file)
            missing = [line for line in block.text.splitlines() if line and line not in rest]
            assert not missing, f"the block at {block.line}: not in the file, or in another order: {missing}"


def test_a_block_is_left_out_only_with_a_reason() -> None:
    page = "text\n\n```bash\na\nb\n```\n<!-- not run: it is long -->\n```bash\nc\n```\n<!-- a remark -->\n```text\nd\n```\n"
    assert blocks(page) == [
        Block(3, "bash", "a\nb", ""),
        Block(8, "bash", "c", "it is long"),
        Block(12, "text", "d", ""),
    ]
