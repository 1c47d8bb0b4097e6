"""Texts to sentences with NLTK's Punkt, without any network: the tables of English stand beside this file.

Other languages need NLTK's own tables, found where NLTK looks for them (NLTK_DATA).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.core.config.flags.declare import ConfigError

if TYPE_CHECKING:
    from nltk.tokenize.punkt import PunktParameters

TABLES = Path(__file__).parent / "punkt"
WINDOW = 1_000_000  # characters; longer texts are split window by window, as Megatron does

Split = Callable[[str], list[str]]


def sentence_splitter(language: str, keep_newlines: bool) -> Split:
    """Return a function that splits a text into sentences.

    keep_newlines: white space after a sentence stays with it, so that the sentences concatenated are the text (but for
    white space at its end). Else white space between sentences is dropped. `ConfigError` if NLTK or its tables are
    missing.
    """
    spans = _sentence_span_finder(language)

    def split_into_sentences(text: str) -> list[str]:
        sentences: list[str] = []
        for low in range(0, len(text), WINDOW):
            window = text[low : low + WINDOW] if len(text) > WINDOW else text
            result = spans(window)
            if keep_newlines and result:
                ends = [start for start, _ in result[1:]] + [
                    len(window if low + WINDOW < len(text) else window.rstrip())
                ]
                result = [(start, end) for (start, _), end in zip(result, ends)]
            sentences += [window[start:end] for start, end in result]
        return sentences

    return split_into_sentences


def nltk_version() -> str:
    """Return NLTK's version, on which sentence borders depend. `ConfigError` if it is not installed."""
    try:
        import nltk
    except ImportError as error:
        raise ConfigError("--split-sentences needs the package nltk: pip install nltk") from error
    return nltk.__version__


def _sentence_span_finder(language: str) -> Callable[[str], list[tuple[int, int]]]:
    """Return a function that finds (start, end) of every sentence. `ConfigError` if NLTK lacks the language's tables."""
    nltk_version()
    from nltk.tokenize import punkt

    if (TABLES / language).is_dir() and language.isalpha():
        splitter = punkt.PunktSentenceTokenizer(_read_punkt_tables(TABLES / language, punkt.PunktParameters()))
    else:
        try:
            splitter = punkt.PunktTokenizer(language)
        except (LookupError, ValueError, OSError) as error:
            raise ConfigError(
                f"--lang {language}: NLTK has no Punkt tables of that language. Only English comes along; on a machine "
                "with a network run python -m nltk.downloader -d FOLDER punkt_tab, copy FOLDER to this machine and set "
                "NLTK_DATA to it"
            ) from error
    return lambda text: list(splitter.span_tokenize(text))


def _read_punkt_tables(folder: Path, parameters: PunktParameters) -> PunktParameters:
    """Fill Punkt's parameters from its four tables."""

    def read_table_lines(name: str) -> list[str]:
        return (folder / name).read_text(encoding="utf-8").splitlines()

    parameters.abbrev_types.update(read_table_lines("abbrev_types.txt"))
    parameters.sent_starters.update(read_table_lines("sent_starters.txt"))
    parameters.collocations.update(tuple(line.split("\t")) for line in read_table_lines("collocations.tab"))
    parameters.ortho_context.update(
        (word, int(flags))
        for word, _, flags in (line.partition("\t") for line in read_table_lines("ortho_context.tab"))
    )
    return parameters
