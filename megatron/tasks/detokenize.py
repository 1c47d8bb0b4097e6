"""Text as people write it, from corpora that are published with white space around every token.

A language model that learned from ordinary text is to be scored on ordinary text; the perplexity is then stated per word of
the published file. Which rules apply is told by the file's name, as in Megatron. They are applied one after the other, in its
order: a space that one of them took away is not there for the next, as in "1 , 000 . ; b".
"""

from __future__ import annotations

import re
from pathlib import Path

_Rules = tuple[tuple[str, str], ...]

_WIKITEXT: _Rules = (
    (r"s '", "s'"),  # plural possessives
    (r"/' [0-9]/", r"/'[0-9]/"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (r" @\.@ ", "."),  # inside words and numbers
    (" : ", ": "),
    (" ; ", "; "),
    (r" \. ", ". "),
    (" ! ", "! "),
    (r" \? ", "? "),
    (" , ", ", "),
    (r"\(\s*([^\)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (r"{\s*([^}]*?)\s*}", r"{\1}"),
    (r"\"\s*([^\"]*?)\s*\"", r'"\1"'),
    (r"'\s*([^']*?)\s*'", r"'\1'"),
    (r"= = = =", "===="),
    (r"= = =", "==="),
    (r"= =", "=="),
    (" \u00b0 ", "\u00b0"),
    (r" \n", "\n"),
    (r"\n ", "\n"),
    (r" N ", " 1 "),
    (r" 's", "'s"),
)
_PENN_TREEBANK: _Rules = (
    (r" '", "'"),
    (r" \n", "\n"),
    (r"\n ", "\n"),
    (r" n't", "n't"),
    (r" N ", "1 "),
    (r"\$ 1", "$1"),
    (r"# 1", "#1"),  # Megatron's, which takes the space before a number: perplexities compare
)
_BY_NAME: tuple[tuple[str, _Rules], ...] = (("wiki", _WIKITEXT), ("ptb", _PENN_TREEBANK), ("lambada", ()))


def detokenize_corpus_text(text: str, path: str | Path) -> str:
    """Return the text of a published corpus as people write it, by the rules for its file name; other files as they
    are.
    """
    rules = next((rules for word, rules in _BY_NAME if word in str(path)), ())
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text)
    return text
