"""`megatron <verb>`: its help is true and quick, each verb is what its file does, and former names lead to it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.cli import verbs
from megatron.cli.former_names import verb_of_former_name
from megatron.cli.verbs import GROUPS, VERBS, help_text, verb_file, verb_sentence
from tests.helpers.architecture import ROOT

COMMANDS = ROOT / "megatron/cli/commands"
MEGATRONS = (  # scripts that Megatron-LM has at the same path
    "preprocess_data merge_datasets preprocess_mmdata run_text_generation_server text_generation_cli checkpoint/convert"
).split()


def started(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """What a process says that Python starts with these words."""
    return subprocess.run([sys.executable, *words], cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


def test_every_file_of_the_commands_is_a_verb() -> None:
    files = {path for path in COMMANDS.rglob("*.py") if path.name != "__init__.py"}
    assert files == {verb_file(verb) for verb in VERBS} - {verb_file(verb) for verb in GROUPS["training"]}
    for verb in VERBS:
        tree = ast.parse(verb_file(verb).read_text(encoding="utf-8"))
        assert any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body), verb


@pytest.mark.parametrize("verb", VERBS)
def test_the_sentence_of_a_verb_is_one_that_begins_its_file(verb: str) -> None:
    sentence = verb_sentence(verb)
    text = ast.get_docstring(ast.parse(verb_file(verb).read_text(encoding="utf-8"))) or ""
    assert text.startswith(sentence.rstrip("."))
    assert sentence[0].isupper() and ". " not in sentence and "?" not in sentence and len(sentence) <= 120


def test_help_lists_all_verbs_and_does_not_wait_for_torch() -> None:
    done = started("-X", "importtime", "-m", "megatron", "--help")
    assert done.returncode == 0 and done.stdout == help_text()
    assert all(f"  {verb} " in done.stdout for verb in VERBS)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "megatron.cli.verbs" in loaded and not loaded & {"torch", "numpy", "argparse"}
    assert len({name for name in loaded if name.startswith("megatron")}) <= 10


def test_a_group_of_verbs_has_help_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["megatron", "checkpoint", "--help"])
    verbs.main()
    listed = capsys.readouterr().out
    assert "checkpoint resume-check" in listed and "preprocess-data" not in listed


@pytest.mark.parametrize(
    "words, hint",
    [
        ("plna --gpu x", "plna is not a verb; did you mean plan?"),
        ("check_config", "check_config is not a verb; did you mean check-config?"),
        ("checkpoint exprt", "checkpoint exprt is not a verb; did you mean checkpoint export?"),
        ("zzzzzz --help", "zzzzzz is not a verb; megatron --help lists them"),
    ],
)
def test_an_unknown_verb_ends_with_the_nearest(
    words: str, hint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["megatron", *words.split()])
    with pytest.raises(SystemExit) as end:
        verbs.main()
    assert end.value.code == 2 and capsys.readouterr().err == f"megatron: {hint}\n"


def test_a_verb_is_its_program_with_its_code(tmp_path: Path) -> None:
    helped = started("-m", "megatron", "unigram-entropy", "--help")
    assert helped.returncode == 0 and helped.stdout.startswith(
        "usage: megatron unigram-entropy PREFIX [options]\n\nCompute"
    )
    assert started("-m", "megatron", "--help", "unigram-entropy").stdout == helped.stdout
    script = started("-m", "megatron", "pretrain-gpt", "--help", "hidden", "size")
    assert script.returncode == 0 and "--hidden-size" in script.stdout, script.stderr
    refused = started("-m", "megatron", "pretrain-gpt", "--num-leyers", "3")
    assert refused.returncode == 2 and "did you mean --num-layers" in refused.stderr
    assert started("-m", "megatron", "replay", str(tmp_path)).returncode == 2


def test_former_names_say_their_verb_and_run_it() -> None:
    scripts = {path for path in (ROOT / "tools").rglob("*.py")}
    stay = {ROOT / "tools" / f"{name}.py" for name in MEGATRONS}
    assert {verb_of_former_name(str(path)) for path in scripts} == set(VERBS) - set(GROUPS["training"])
    for path in scripts:
        assert ("former_names" in path.read_text(encoding="utf-8")) == (path not in stay)
    now, before = started("-m", "megatron", "unigram-entropy", "--help"), started("tools/unigram_entropy.py", "--help")
    assert before.stdout == now.stdout and before.returncode == 0
    assert before.stderr.startswith("note: the next release has no unigram_entropy.py; use `megatron unigram-entropy`")
    stays = started("tools/merge_datasets.py", "--help")
    assert stays.stdout.startswith("usage: merge_datasets.py ") and not stays.stderr
