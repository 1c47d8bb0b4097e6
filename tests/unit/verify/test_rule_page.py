"""The page of all rules: it is made from the rows, is current, and every example breaks its own rule only."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.core.config.rules.engine import ALWAYS, NEEDS, RULES
from megatron.verify.rule_page import BASE, EXAMPLES, OTHERS, BrokenRuleExample, rules_page_markdown

ROOT = Path(__file__).resolve().parents[3]


def test_every_rule_has_a_sentence_and_an_example() -> None:
    rules = (*NEEDS, *RULES, *ALWAYS)
    assert all(rule.sentence for rule in rules), [rule.name for rule in rules if not rule.sentence]
    assert set(EXAMPLES) == {rule.name for rule in rules} | set(OTHERS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_breaks_its_rule_and_no_other(name: str) -> None:
    assert {one.rule for one in EXAMPLES[name].find_broken_rules()} == {name}


def test_the_flags_behind_the_examples_keep_every_rule() -> None:
    for entry in ("pretrain_gpt.py", "pretrain_bert.py", "pretrain_t5.py"):
        assert BrokenRuleExample(entry=entry).find_broken_rules() == (), BASE


def test_the_page_in_docs_is_the_one_that_the_rows_make() -> None:
    found = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")
    assert found == rules_page_markdown(), "run: megatron check-config --write-rules docs/rules.md"
