"""Checks of a tokenizer: its special ids, round trips of difficult text and of a corpus, its own tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.huggingface import HuggingFaceTokenizer
from megatron.core.tokenizers.sample import DIFFICULT

LOSSLESS = ("byte-level BPE", "bytes")
SHOWN = 5


@dataclass(slots=True)
class TokenizerFindings:
    """Results of the checks. wrong: problems that will break a run or its data. notes: intended behaviour that may
    surprise.
    """

    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class CorpusFindings:
    """Round trips over a corpus.

    texts, num_bytes, ids: their numbers. lost: texts that decoding does not restore; first_loss: the first difference.
    highest: largest id.
    """

    texts: int = 0
    num_bytes: int = 0
    ids: int = 0
    lost: int = 0
    highest: int = -1
    first_loss: str = ""


def check_tokenizer(tokenizer: Tokenizer, rows: int | None) -> TokenizerFindings:
    """Check the tokenizer's ids and round trips of the built-in difficult text. rows: number of ids of the model, if
    known.
    """
    findings = TokenizerFindings()
    _check_special_ids(tokenizer, findings)
    if rows is not None and tokenizer.vocab_size > rows:
        beyond = [_token_name(tokenizer, token) for token in range(rows, tokenizer.vocab_size)]
        findings.wrong.append(
            f"{len(beyond)} ids are beyond the model's {rows}: {_list_some(beyond)}; give the model a vocabulary of "
            f"{tokenizer.vocab_size} or more"
        )
    if tokenizer.unique_identifiers["algorithm"] != "ids as text":  # its texts are numbers, which the samples are not
        _check_round_trips(tokenizer, findings)
        _check_special_token_injection(tokenizer, findings)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        _check_added_tokens(tokenizer, findings)
    return findings


def check_corpus(tokenizer: Tokenizer, batches: Iterable[Sequence[str]]) -> CorpusFindings:
    """Encode and decode all texts, and count those that are not restored."""
    result = CorpusFindings()
    for texts in batches:
        for text in texts:
            ids = tokenizer.tokenize(text)
            back = _round_trip(tokenizer, ids)
            result.texts += 1
            result.num_bytes += len(text.encode())
            result.ids += len(ids)
            result.highest = max(result.highest, max(ids, default=-1))
            if back != text:
                result.lost += 1
                result.first_loss = result.first_loss or _first_difference(text, back)
    return result


def promises_round_trips(tokenizer: Tokenizer) -> bool:
    """Return whether decoding should restore every text."""
    return tokenizer.unique_identifiers["algorithm"] in LOSSLESS


def _check_special_ids(tokenizer: Tokenizer, findings: TokenizerFindings) -> None:
    roles = {role: getattr(tokenizer, role) for role in ("eod", "eos", "bos", "pad", "cls", "sep", "mask")}
    given = {role: token for role, token in roles.items() if token is not None}
    for role, token in given.items():
        if not 0 <= token < tokenizer.vocab_size:
            findings.wrong.append(f"{role} is {token}, which is not an id from 0 to {tokenizer.vocab_size - 1}")
    others = [role for role, token in given.items() if role != "pad" and token == given.get("pad")]
    if others:
        findings.wrong.append(
            f"pad and {', '.join(others)} are one id, {_token_name(tokenizer, given['pad'])}: what is padding "
            "cannot be told from it, and would get no loss"
        )
    if "bos" in given and given["bos"] in (given.get("eos"), given["eod"]):
        findings.notes.append(
            f"bos and eos are one id, {_token_name(tokenizer, given['bos'])}: begin and end of a text look the same"
        )
    if "pad" not in given:
        findings.notes.append("there is no padding id")
    sentinels = tokenizer.additional_special_tokens_ids
    if len(set(sentinels)) != len(sentinels):
        findings.wrong.append("several sentinels are one id")


def _check_round_trips(tokenizer: Tokenizer, findings: TokenizerFindings) -> None:
    lost = []
    for kind, text in DIFFICULT.items():
        back = _round_trip(tokenizer, tokenizer.tokenize(text))
        if back != text:
            lost.append(f"{kind} ({_first_difference(text, back)})")
    if lost and promises_round_trips(tokenizer):
        findings.wrong.append(
            f"{len(lost)} of {len(DIFFICULT)} kinds of text do not come back from their ids: {'; '.join(lost)}"
        )
    elif lost:
        findings.notes.append(
            f"{len(lost)} of {len(DIFFICULT)} kinds of text are changed, as this kind of tokenizer normalizes "
            f"text or lacks tokens: {'; '.join(lost)}"
        )


def _check_special_token_injection(tokenizer: Tokenizer, findings: TokenizerFindings) -> None:
    around = set(tokenizer.tokenize(""))
    forged = [
        name
        for name, token in tokenizer.special.items()
        if token not in around and any(token in tokenizer.tokenize(text) for text in (name, f"x{name}y", f"x {name} y"))
    ]
    if forged:
        findings.wrong.append(f"text that holds the name of a special token becomes that token: {_list_some(forged)}")


def _check_added_tokens(tokenizer: HuggingFaceTokenizer, findings: TokenizerFindings) -> None:
    added = tokenizer.added_tokens
    inside = [
        repr(token.content)
        for number, token in added.items()
        if not token.special and number in tokenizer.tokenize(f"x{token.content}y")
    ]
    if inside:
        findings.wrong.append(f"added tokens are found inside words of ordinary text: {_list_some(inside)}")
    strips = [repr(token.content) for token in added.values() if token.lstrip or token.rstrip]
    if strips:
        findings.notes.append(f"added tokens swallow the white space beside them: {_list_some(strips)}")


def _round_trip(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the decoded text, without the tokens that the tokenizer adds around every text."""
    around = tokenizer.tokenize("")
    count = len(around)
    for first in range(count + 1) if count else ():
        last = len(ids) - (count - first)
        if list(ids[:first]) == around[:first] and list(ids[last:]) == around[first:]:
            return tokenizer.detokenize(ids[first:last])
    return tokenizer.detokenize(ids)


def _first_difference(text: str, back: str) -> str:
    """Describe where a text and its round trip first differ."""
    place = next(
        (place for place, (left, right) in enumerate(zip(text, back)) if left != right), min(len(text), len(back))
    )
    return f"{ascii(text[place : place + 12])} became {ascii(back[place : place + 12])}"


def _token_name(tokenizer: Tokenizer, token: int) -> str:
    try:
        return f"{token} {ascii(tokenizer.id_to_token(token))}"
    except (KeyError, IndexError):
        return f"{token} (no token)"


def _list_some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
