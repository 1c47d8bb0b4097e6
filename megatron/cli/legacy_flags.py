"""Megatron flags of other times and other features: renamed, ignored, not built yet, or refused; never dropped in silence.

`translate_legacy_flags` reads the command line before argparse does. Our own flags pass through untouched; for the rest
`legacy_table.py` knows what becomes of them. What comes back is the command line that argparse will understand, a sentence
for everything that was accepted in a way the user should know, and all errors at once. A flag that neither our configs
nor the table know is left where it is, for argparse to find and for `similar_flags` to explain.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from megatron.cli.legacy_table import REPLACED, ROWS, VALUES, LegacyFlag

TABLE: Mapping[str, LegacyFlag] = MappingProxyType({row.flag: row for row in ROWS})
FAMILIES: Mapping[str, LegacyFlag] = MappingProxyType({row.flag[:-1]: row for row in ROWS if row.flag.endswith("*")})
REFUSED_VALUES: Mapping[tuple[str, str], str] = MappingProxyType(
    {(flag, value): reason for flag, values, reason in VALUES for value in values.split()}
)
REPLACED_VALUES: Mapping[tuple[str, str], tuple[str, str]] = MappingProxyType(
    {
        (flag, value): (word, reason)
        for flags, values, word, reason in REPLACED
        for flag in flags.split()
        for value in values.split()
    }
)


def translate_legacy_flags(argv: Sequence[str], known: Collection[str]) -> tuple[list[str], list[str], list[str]]:
    """Translate old flags: (words for argparse, messages, errors). known: every spelling of our flags."""
    result = _LegacyTranslationResult()
    place = 0
    while place < len(argv):
        token, place = argv[place], place + 1
        name, glued, value = token.partition("=")
        row = None if name in known or not _is_flag(token) else find_legacy_flag(name, known)
        if row is None and name not in known:
            result.words.append(token)
            continue
        given = [value] if glued else _words_until_flag(argv, place) if row is None or row.takes_values else []
        place += 0 if glued else len(given)
        if row is None:
            result.words += _replace_legacy_values(token, name, given, glued, result.messages, result.errors)
        else:
            result.add_legacy_flag(row, name, given)
    result.messages += [_old_switch_message(formatted, row, result.words) for formatted, row in result.yielding]
    return result.front + result.words, list(dict.fromkeys(result.messages)), list(dict.fromkeys(result.errors))


@dataclass
class _LegacyTranslationResult:
    """Result so far. front: words that explicit settings override, put first; yielding: (text, row) of their flags."""

    front: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    yielding: list[tuple[str, LegacyFlag]] = field(default_factory=list)

    def add_legacy_flag(self, row: LegacyFlag, name: str, given: Sequence[str]) -> None:
        """Translate one flag that is not ours, with its values."""
        formatted = " ".join([name, *given])
        if row.kind == "renamed":
            (self.front if row.yields else self.words).extend([*row.becomes, *given])
            if row.yields:
                self.yielding.append((formatted, row))
            elif row.sentence:
                self.messages.append(f"{formatted} is understood as {' '.join([*row.becomes, *given])}")
        elif (accepted := _legacy_acceptance_text(row, given)) is not None:
            self.messages.append(f"{formatted} is {accepted}: {row.sentence}")
        else:
            advice = "; leave it out" if row.kind == "later" and ";" not in row.sentence else ""
            self.errors.append(f"{formatted}: {row.sentence}{advice}")


def _legacy_acceptance_text(row: LegacyFlag, given: Sequence[str]) -> str | None:
    """Return how a flag that is not ours is accepted ('ignored' ..), or None if it is refused."""
    if row.kind == "ignored":
        return "ignored"
    return "accepted, as it changes nothing" if _has_harmless_values(row, given) else None


def _replace_legacy_values(
    token: str, name: str, given: list[str], glued: str, messages: list[str], errors: list[str]
) -> list[str]:
    """Return the words of a flag of ours, Megatron's own values replaced; adds to `messages` and `errors`."""
    errors += [f"{name} {word}: {REFUSED_VALUES[name, word]}" for word in given if (name, word) in REFUSED_VALUES]
    if not any((name, word) in REPLACED_VALUES for word in given):
        return [token] if glued else [token, *given]
    messages += [
        f"{name} {word} is accepted, as it changes nothing: {REPLACED_VALUES[name, word][1]}"
        for word in given
        if (name, word) in REPLACED_VALUES
    ]
    return [name, *filter(None, (REPLACED_VALUES.get((name, word), (word,))[0] for word in given))]


def _old_switch_message(formatted: str, row: LegacyFlag, words: Sequence[str]) -> str:
    """How an old switch is understood, and which explicit settings win over it."""
    flags = [word for word in row.becomes if _is_flag(word)]
    winners = [
        " ".join([word, *_words_until_flag(words, place + 1)]) for place, word in enumerate(words) if word in flags
    ]
    return f"{formatted} is understood as {' '.join(row.becomes)}" + (
        f", which gives way to {' '.join(winners)}" if winners else ""
    )


def find_legacy_flag(flag: str, known: Collection[str]) -> LegacyFlag | None:
    """Return the row of a flag that is not ours, also by prefix or negation; None if it is unknown."""
    if flag in TABLE:
        return TABLE[flag]
    family = next((row for prefix, row in FAMILIES.items() if flag.startswith(prefix)), None)
    if family is not None:
        return family
    negated = re.fullmatch(r"--(no|disable)-(.+)", flag)
    if negated is None:
        return None
    other = f"--no-{negated[2]}"
    if negated[1] == "disable" and (other in known or other in TABLE):
        # Megatron gives each switch that is on both spellings; they are one flag, so there is nothing to tell.
        return TABLE.get(other) or LegacyFlag(flag, "renamed", "", becomes=(other,))
    switch = TABLE.get(f"--{negated[2]}")
    if switch is None or switch.takes_values or switch.kind == "renamed":
        return None
    return LegacyFlag(flag, "ignored", f"what it switches off is never on; {switch.sentence}")


def similar_flags(flag: str, known: Collection[str]) -> list[str]:
    """Up to three of our flags that are spelled much like this one, the most similar first."""
    return difflib.get_close_matches(flag.partition("=")[0].replace("_", "-"), list(known), n=3, cutoff=0.75)


def _is_flag(token: str) -> bool:
    """Whether a word begins a new option; a negative number does not."""
    return re.match(r"--?[A-Za-z]", token) is not None


def _words_until_flag(argv: Sequence[str], place: int) -> list[str]:
    """Return the words from this index up to the next flag."""
    end = place
    while end < len(argv) and not _is_flag(argv[end]):
        end += 1
    return list(argv[place:end])


def _has_harmless_values(row: LegacyFlag, given: Sequence[str]) -> bool:
    """Whether values are given and all are among the row's harmless ones."""
    return bool(given) and all(any(_equal_flag_values(word, harmless) for harmless in row.harmless) for word in given)


def _equal_flag_values(word: str, other: str) -> bool:
    """Equal as numbers if both are numbers, else as words."""
    try:
        return float(word) == float(other)
    except ValueError:
        return word == other
