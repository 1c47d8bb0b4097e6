"""Tokens of captions by the Penn Treebank's rules, as the tokenizer behind COCO's caption scores cuts them (Stanford's, of 2014).

    A man's t-shirt isn't $4.50!  ->  a man 's t-shirt is n't $ 4.50

At each place the longest of the kinds below is taken. Punctuation is then left out, and what is left is in lower case; capitals matter
before, since `in. The` ends a sentence where `Pa. Dutch` does not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_LEFT_OUT = frozenset(
    ('"', "\u2013", "\u2014", "\u2026", "''", "'", "``", "`", ".", "?", "!", ",", ":", "-", "--", "...", ";")
)
_REPLACED = dict(
    zip(
        "( ) [ ] { } \u00a3 \u20ac \u00bd \u00bc \u00be \u2153 \u2154".split(),
        "-lrb- -rrb- -lsb- -rsb- -lcb- -rcb- # $ 1/2 1/4 3/4 1/3 2/3".split(),
    )
)
_ENTITIES = dict(zip("amp lt gt quot apos nbsp AMP LT GT NBSP".split(), "&<>\"' &<> "))
_ENTITY = re.compile(rf"&({'|'.join(_ENTITIES)});")
_QUOTES = str.maketrans("\u2019\u2018\u201c\u201d\u00a0\u2026", '\'`"" \u2026')
# Words that keep their full stop: anywhere, with a capital, and before a number.
_ABBREVIATIONS = (
    "adj adm adv al ala apr ariz assn assoc asst atty attys aug ave bancorp bhd bldg blvd brig bros calif capt cf cie cmdr co "
    "col colo comdr conn corp cos cpl ct dak dec dept det dr drs ens esq est etc ext feb fla fri ft ga gen gov govs hon inc "
    "ind intl jan jos jr jul jun kan kans ky lieut lt ltd maj mar md messrs mfg mich minn mlle mme mo mon mont mr mrs ms mt "
    "mtg neb nev nov oct okla penn pfc ph plc pres prof profs pte ptes pty ptys pvt rd rep reps rev rt sen sens sep sept seq "
    "sfc sgt spc sq sr st ste supt supts sys tel tenn thu thurs tue tues univ va vs vt wed wis wisc wm wyo"
)
_WITH_CAPITAL = "Ark Az Del Ill La Mass Miss Ore Pa Tex Wash"
_BEFORE_NUMBER = "art ca fig figs no nos op pp"
_TWO_WORDS = {
    **{word: (word[:3], word[3:]) for word in ("cannot", "gonna", "gotta", "lemme", "wanna")},
    **{"gimme": ("gim", "me"), "'tis": ("'t", "is"), "'twas": ("'t", "was")},
}
_LETTER = r"(?:(?![\u00b2\u00b3\u00b9\u00bc-\u00be\u2070-\u218f\u2460-\u24ff])[^\W\d])"
_ALNUM = rf"(?:(?!_){_LETTER}|\d)"
_NUMBER = r"(?:\d*(?:[.,:]\d+)+|\d+)"
_KINDS = [
    re.compile(pattern)
    for pattern in (
        # Words, numbers, and what joins them.
        r"(?i:cannot|gonna|gotta|lemme|gimme|wanna)(?![^\W_])|'(?i:tis|twas)(?![^\W_])",
        rf"(?:(?!_){_LETTER})+|_+|#+",
        rf"{_ALNUM}+(?:_{_ALNUM}+)+",
        rf"(?:[dDoOlL]')?{_ALNUM}+(?:-(?:[dDoOlL]')?{_ALNUM}+)*",
        rf"{_NUMBER}(?:-{_ALNUM}+)*",
        rf"[-+]?{_NUMBER}",
        r"\d{1,4}[- ]\d{1,4}/\d{1,4}|\d{1,4}/\d{1,4}",
        rf"{_ALNUM}+(?:\.{_ALNUM}+)*(?:/{_ALNUM}+)+",
        r"[A-Z]+(?:&[A-Z]+)+|&#\d+;",
        # Words with full stops.
        r"(?:[A-Za-z]\.)+",
        r"[A-Za-z]+(?:\.[A-Za-z]+)+",
        rf"(?i:{'|'.join(_ABBREVIATIONS.split())})\.",
        rf"(?:{'|'.join(f'{word}|{word.upper()}' for word in _WITH_CAPITAL.split())})\.",
        rf"(?i:{'|'.join(_BEFORE_NUMBER.split())})\.(?=\s*#?\d)",
        r"(?i:ph\.d\.)",
        # Words with apostrophes.
        r"'(?i:s|m|d|re|ve|ll)(?![^\W_])|(?i:n't)(?![^\W_])",
        r"(?i:c'mon|ma'am|o'clock|ol'|'em|'cause|'til|'n'?)(?![^\W_])|(?i:y')(?=\w)",
        r"'\d0[sS](?![^\W_])|(?i:'n')",
        # Signs that stay together, and addresses.
        r"\.\.\.|\u2026|--+|[?!]+|\*+|[\u2013\u2014]",
        r"[:;=]-?[()DPp](?![^\W_])",
        r"<[!/]?[A-Za-z][^<>\n]*>",
        r"(?i:https?://|www\.)[^\s\"<>]+[^\s\"<>.,!?;:)]",
        r"[A-Za-z0-9._-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+",
        r"@[A-Za-z_]\w*|#[A-Za-z]\w*",
    )
]
_PLAIN = re.compile(r"[a-z]+(?= |$)")
_NOT = re.compile(r"(?i:n't)(?![^\W_])")


def tokenize_caption_for_metrics(text: str) -> list[str]:
    """Return the tokens of a caption in lower case, without punctuation."""
    text = _ENTITY.sub(lambda entity: _ENTITIES[entity[1]], text.replace("\n", " "))
    # Characters beyond the first 65,536, such as emoji, are no tokens.
    text = "".join(character for character in text if character <= "\uffff").translate(_QUOTES)
    tokens: list[str] = []
    place = 0
    while place < len(text):
        if text[place].isspace() or not text[place].isprintable():
            place += 1
            continue
        end = _end_of_token(text, place)
        tokens += _normalize_token(text[place:end])
        place = end
    return [token for token in tokens if token not in _LEFT_OUT]


def _end_of_token(text: str, place: int) -> int:
    """Return where the token that begins at `place` ends."""
    plain = _PLAIN.match(text, place)
    if plain and plain[0] not in _TWO_WORDS:
        return plain.end()
    end = max((match.end() for kind in _KINDS if (match := kind.match(text, place))), default=place + 1)
    # Of `isn't` the first token is `is`.
    return end - 1 if end - 1 > place and text[place:end].isalpha() and _NOT.match(text, end - 1) else end


def _normalize_token(token: str) -> Sequence[str]:
    """Return a token in lower case with brackets and currencies by the Treebank's names; two for words such as cannot."""
    lowered = token.lower()
    if lowered in _TWO_WORDS:
        return _TWO_WORDS[lowered]
    if lowered[0] in ":;=" and len(lowered) > 1:  # a face
        return ("".join(_REPLACED.get(character, character) for character in lowered),)
    return ("--",) if lowered[:2] == "--" else (_REPLACED.get(lowered, lowered).replace(" ", "\u00a0"),)
