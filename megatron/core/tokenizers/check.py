"""Checks of a tokenizer: its special ids, round trips of difficult text and of a corpus, its own tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.difficult_texts import DIFFICULT
from megatron.core.tokenizers.huggingface import HuggingFaceTokenizer

LOSSLESS = ("byte-level BPE", "bytes")
SHOWN = 5


@dataclass(slots=True)
class TokenizerFindings:
    """Results of the checks. wrong: what will break a run or its data. notes: intended behaviour that may surprise."""

    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class CorpusRoundTrips:
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


def examine_tokenizer(tokenizer: Tokenizer, rows: int | None) -> TokenizerFindings:
    """Examine a tokenizer's special ids, vocabulary size and round trips of difficult text; return the findings.

    rows: number of ids of the model, if known. Nothing is raised.
    """
    findings = TokenizerFindings()
    _examine_special_ids(tokenizer, findings)
    if rows is not None and tokenizer.vocab_size > rows:
        beyond = [_describe_token(tokenizer, token) for token in range(rows, tokenizer.vocab_size)]
        findings.wrong.append(
            f"{len(beyond)} ids are beyond the model's {rows}: {_list_first_names(beyond)}; give the model a vocabulary of "
            f"{tokenizer.vocab_size} or more"
        )
    if tokenizer.unique_identifiers["algorithm"] != "ids as text":  # its texts are numbers, which the samples are not
        _examine_round_trips(tokenizer, findings)
        _examine_token_injection(tokenizer, findings)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        _examine_added_token_matching(tokenizer, findings)
    return findings


def measure_corpus_round_trips(tokenizer: Tokenizer, batches: Iterable[Sequence[str]]) -> CorpusRoundTrips:
    """Encode and decode all texts; return counts, among them of texts that decoding does not restore."""
    result = CorpusRoundTrips()
    for texts in batches:
        for text in texts:
            ids = tokenizer.tokenize(text)
            back = _decode_without_added_ids(tokenizer, ids)
            result.texts += 1
            result.num_bytes += len(text.encode())
            result.ids += len(ids)
            result.highest = max(result.highest, max(ids, default=-1))
            if back != text:
                result.lost += 1
                result.first_loss = result.first_loss or _describe_first_text_difference(text, back)
    return result


def promises_round_trips(tokenizer: Tokenizer) -> bool:
    """Return whether decoding should restore every text."""
    return tokenizer.unique_identifiers["algorithm"] in LOSSLESS


def _examine_special_ids(tokenizer: Tokenizer, findings: TokenizerFindings) -> None:
    """Note special ids outside the vocabulary, or shared by roles that must differ."""
    roles = {role: getattr(tokenizer, role) for role in ("eod", "eos", "bos", "pad", "cls", "sep", "mask")}
    given = {role: token for role, token in roles.items() if token is not None}
    for role, token in given.items():
        if not 0 <= token < tokenizer.vocab_size:
            findings.wrong.append(f"{role} is {token}, which is not an id from 0 to {tokenizer.vocab_size - 1}")
    others = [role for role, token in given.items() if role != "pad" and token == given.get("pad")]
    if others:
        findings.wrong.append(
            f"pad and {', '.join(others)} are one id, {_describe_token(tokenizer, given['pad'])}: what is padding "
            "cannot be told from it, and would get no loss"
        )
    if "bos" in given and given["bos"] in (given.get("eos"), given["eod"]):
        findings.notes.append(
            f"bos and eos are one id, {_describe_token(tokenizer, given['bos'])}: begin and end of a text look the same"
        )
    if "pad" not in given:
        findings.notes.append("there is no padding id")
    sentinels = tokenizer.additional_special_tokens_ids
    if len(set(sentinels)) != len(sentinels):
        findings.wrong.append("several sentinels are one id")


def _examine_round_trips(tokenizer: Tokenizer, findings: TokenizerFindings) -> None:
    """Note kinds of difficult text that decoding does not restore."""
    lost = []
    for kind, text in DIFFICULT.items():
        back = _decode_without_added_ids(tokenizer, tokenizer.tokenize(text))
        if back != text:
            lost.append(f"{kind} ({_describe_first_text_difference(text, back)})")
    if lost and promises_round_trips(tokenizer):
        findings.wrong.append(
            f"{len(lost)} of {len(DIFFICULT)} kinds of text do not come back from their ids: {'; '.join(lost)}"
        )
    elif lost:
        findings.notes.append(
            f"{len(lost)} of {len(DIFFICULT)} kinds of text are changed, as this kind of tokenizer normalizes "
            f"text or lacks tokens: {'; '.join(lost)}"
        )


def _examine_token_injection(tokenizer: Tokenizer, findings: TokenizerFindings) -> None:
    """Note names of special tokens that ordinary text turns into those tokens."""
    around = set(tokenizer.tokenize(""))
    forged = [
        name
        for name, token in tokenizer.special.items()
        if token not in around and any(token in tokenizer.tokenize(text) for text in (name, f"x{name}y", f"x {name} y"))
    ]
    if forged:
        findings.wrong.append(
            f"text that holds the name of a special token becomes that token: {_list_first_names(forged)}"
        )


def _examine_added_token_matching(tokenizer: HuggingFaceTokenizer, findings: TokenizerFindings) -> None:
    """Note added tokens that match inside words of ordinary text, or swallow white space beside them."""
    added = tokenizer.added_tokens
    inside = [
        repr(token.content)
        for number, token in added.items()
        if not token.special and number in tokenizer.tokenize(f"x{token.content}y")
    ]
    if inside:
        findings.wrong.append(f"added tokens are found inside words of ordinary text: {_list_first_names(inside)}")
    strips = [repr(token.content) for token in added.values() if token.lstrip or token.rstrip]
    if strips:
        findings.notes.append(f"added tokens swallow the white space beside them: {_list_first_names(strips)}")


def _decode_without_added_ids(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Decode ids without those that the tokenizer adds around every text."""
    around = tokenizer.tokenize("")
    count = len(around)
    for first in range(count + 1) if count else ():
        last = len(ids) - (count - first)
        if list(ids[:first]) == around[:first] and list(ids[last:]) == around[first:]:
            return tokenizer.detokenize(ids[first:last])
    return tokenizer.detokenize(ids)


def _describe_first_text_difference(text: str, back: str) -> str:
    """Describe where a text and its round trip first differ."""
    place = next(
        (place for place, (left, right) in enumerate(zip(text, back)) if left != right), min(len(text), len(back))
    )
    return f"{ascii(text[place : place + 12])} became {ascii(back[place : place + 12])}"


def _describe_token(tokenizer: Tokenizer, token: int) -> str:
    """Return an id and its token as text, for messages."""
    try:
        return f"{token} {ascii(tokenizer.id_to_token(token))}"
    except (KeyError, IndexError):
        return f"{token} (no token)"


def _list_first_names(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are, as text."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
