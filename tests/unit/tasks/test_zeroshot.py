"""Zero-shot scores: every label once, the published definitions, and the numbers of another implementation of GPT-2."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.special_tokens import encode_without_special_tokens
from megatron.core.parallel.mesh import Axis
from megatron.core.tokenizers.build import ByteTokenizer, NullTokenizer, build_tokenizer
from megatron.evaluation.likelihood import LoglikelihoodRequest, argmax_token_ids
from megatron.tasks import zeroshot
from megatron.tasks.zeroshot import TokenWindows, detokenize_corpus_text, read_lambada_passages, read_perplexity_text
from megatron.training.state.trainer import Trainer, build_trainer
from tests.helpers import tiny
from tests.helpers.architecture import ROOT
from tests.helpers.toytext import package_tokenizer
from tests.helpers.world import Worlds
from tests.parity.test_published import ours_and_theirs

IDS = np.random.default_rng(4).integers(0, tiny.VOCABULARY, 61).tolist()
PASSAGES = [LoglikelihoodRequest(tuple(IDS[i : i + 5 + i % 7]), tuple(IDS[i + 20 : i + 21 + i % 3])) for i in range(13)]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(count=st.integers(2, 90), length=st.integers(1, 20), stride=st.integers(1, 20))
def test_every_label_is_scored_once_with_as_much_context_as_there_is(count: int, length: int, stride: int) -> None:
    stride = min(stride, length)
    windows = TokenWindows(list(range(count)), length=length, stride=stride, fill=999)
    seen = []
    for index in range(len(windows)):
        sample = windows[index]
        assert sample["loss_mask"].sum() > 0, "a window that scores nothing"
        for place in np.flatnonzero(sample["loss_mask"]):
            label = int(sample["labels"][place])
            seen.append(label)
            context = sample["tokens"][: place + 1]
            assert context.tolist() == list(range(label - len(context), label))
            assert len(context) >= min(label, length - stride + 1)
    assert seen == list(range(1, count))


@pytest.mark.parametrize("stride", [0, 9])
def test_a_stride_outside_the_window_is_refused(stride: int) -> None:
    with pytest.raises(ConfigError, match=f"--overlapping-eval {stride} is not between 1 and --seq-length 8"):
        TokenWindows([1, 2, 3], length=8, stride=stride, fill=0)


def scored(changes: dict[str, Any], task: str) -> list[float]:
    """On every rank: the scores of the tiny GPT."""
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    run = tiny.run_of(tiny.config(size, openai_gelu=True, micro_batch_size=2, **changes))
    return scores_of(build_trainer(run, tiny.gpt, zeroshot.perplexity_forward_step), task)


def scores_of(trainer: Trainer, task: str) -> list[float]:
    """The scores of the task's small data: a mean loss; or of every last word whether it is right, and its log-likelihood."""
    if task == "perplexity":
        return [
            zeroshot.mean_loss_of_token_windows(
                trainer, TokenWindows(IDS, length=trainer.run.config.train.seq_length, stride=5, fill=0)
            )
        ]
    return [
        number
        for answer in zeroshot.last_word_likelihoods(trainer, PASSAGES)
        for number in (answer.greedy, answer.loglikelihood)
    ]


def theirs(published: Any, task: str, length: int) -> list[float]:
    """The same scores by the published model, a window or passage at a time, with all the context that a window has."""
    with torch.no_grad():
        if task == "perplexity":
            losses, start = [], 0
            while not losses or start + length - 5 < len(IDS) - 1:
                logits = published(torch.tensor([IDS[start : start + length]])).logits[0]
                labels = torch.tensor(IDS[start + 1 : start + length + 1])
                new = F.cross_entropy(logits[: len(labels)], labels, reduction="none")
                losses += (new if start == 0 else new[length - 5 :]).tolist()
                start += 5
            assert len(losses) == len(IDS) - 1
            return [sum(losses) / len(losses)]
        found: list[float] = []
        for passage in PASSAGES:
            word = torch.tensor(passage.continuation)
            logits = published(torch.tensor([passage.context + passage.continuation])).logits[
                0, len(passage.context) - 1 : -1
            ]
            found += [
                bool((logits.argmax(dim=-1) == word).all()),
                -F.cross_entropy(logits, word, reduction="sum").item(),
            ]
        return found


@pytest.mark.parametrize("task", ["perplexity", "last words"])
def test_scores_are_those_of_the_published_model(task: str) -> None:
    trainer, published = ours_and_theirs("gpt2", "fp32", micro_batch_size=2)
    trainer.forward_step = zeroshot.perplexity_forward_step
    expected = theirs(published.eval(), task, trainer.run.config.train.seq_length)
    assert scores_of(trainer, task) == pytest.approx(expected, rel=1e-5)


def test_a_right_word_counts() -> None:
    trainer, published = ours_and_theirs("gpt2", "fp32", micro_batch_size=2)
    passages = []
    for number in range(9):  # every third word is what the model says next; of the others the second token is wrong
        beginning = IDS[number : number + 6]
        word: list[int] = []
        for _ in range(2):
            with torch.no_grad():
                word.append(int(published(torch.tensor([beginning + word])).logits[0, -1].argmax()))
        if number % 3:
            word[1] = (word[1] + 1) % tiny.VOCABULARY
        passages.append(LoglikelihoodRequest(tuple(beginning), tuple(word)))
    answers = zeroshot.last_word_likelihoods(trainer, passages)
    assert [answer.greedy for answer in answers] == [number % 3 == 0 for number in range(9)]
    found = zeroshot.last_word_metrics(answers)
    assert found == {
        "number correct": 3,
        "total examples": 9,
        "avg accuracy": 3 / 9,
        "ppl": pytest.approx(math.exp(-sum(answer.loglikelihood for answer in answers) / 9)),
    }


# Ranks that share experts: here by gathering tokens, which all must have alike.
EXPERTS = {"expert_model_parallel_size": 2, "num_experts": 4, "moe_token_dispatcher_type": "allgather"}
LAYOUT = {"tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"}


@pytest.mark.parametrize("task", ["perplexity", "last words"])
@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (2, {"tensor_model_parallel_size": 2}),
        (2, {"pipeline_model_parallel_size": 2}),
        (2, EXPERTS),
        (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    ],
    ids=str,
)
def test_layouts_give_the_serial_score(world: Worlds, ranks: int, changes: dict[str, Any], task: str) -> None:
    alone = scored({**changes, **dict.fromkeys(LAYOUT & changes.keys(), 1), "sequence_parallel": False}, task)
    for found in world(ranks).run(scored, changes, task):
        assert found == pytest.approx(alone, rel=1e-5)


def test_passages_are_asked_in_batches_of_about_their_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny.run_of(tiny.config(1, micro_batch_size=4, seq_length=64, max_position_embeddings=64))
    trainer, asked = build_trainer(run, tiny.gpt, zeroshot.perplexity_forward_step), []
    plain = trainer.stages[0].forward
    monkeypatch.setattr(
        trainer.stages[0], "forward", lambda **given: (asked.append(tuple(given["ids"].shape)), plain(**given))[1]
    )
    zeroshot.last_word_likelihoods(trainer, PASSAGES)
    lengths = sorted((len(passage.context) + len(passage.continuation) - 1 for passage in PASSAGES), reverse=True)
    assert sorted(asked, reverse=True) == sorted(
        ((4, lengths[0]), (4, lengths[4]), (4, lengths[8]), (1, lengths[12])), reverse=True
    )


def test_the_likeliest_id_is_never_one_of_the_padding() -> None:
    logits = torch.zeros(2, 3, 8)
    logits[..., 6:] = 5.0
    logits[0, 1, 4] = 1.0
    found = argmax_token_ids(logits, Axis("tp"), 6)
    assert found.tolist() == [[0, 4, 0], [0, 0, 0]]


def test_published_text_is_written_as_people_write_it() -> None:
    text = ' = Robert = \n He had a guest @-@ starring role , in the 1 @,@ 000 m ( 3 @.@ 5 ft ) race ; " so " he \'s told . \n'
    expected = ' = Robert =\nHe had a guest-starring role, in the 1,000 m (3.5 ft) race; "so" he\'s told.\n'
    assert detokenize_corpus_text(text, "data/wiki.test.tokens") == expected
    assert detokenize_corpus_text(text, "data/other.txt") == text


def test_wikitext_is_rewritten_one_step_after_the_other_as_megatron_does() -> None:
    random, pieces = (
        np.random.RandomState(0),
        (
            *" '\n\u00b0()[]{}\":;.!?,sNab7",
            "@-@",
            "@,@",
            "@.@",
            " = ",
            " N ",
            " 's",
            "s '",
            " @-@ ",
            " , ",
            " . ",
            "\t",
            "  ",
        ),
    )
    for _ in range(3000):
        text = "".join(random.choice(pieces, random.randint(1, 25)))
        assert detokenize_corpus_text(text, "wiki") == one_by_one(text), repr(text)
    assert detokenize_corpus_text("1 , 000 . ; b . c", "wiki") == "1, 000 .; b. c", (
        "a space that one step took is not there for the next"
    )
    assert detokenize_corpus_text("it 's $ N of N points \n they do n't", "ptb") == "it's $1 of1 points\nthey don't"


def one_by_one(text: str) -> str:
    """WikiText's steps in Megatron's order, without patterns: pieces of text, and what stands between two brackets."""
    steps = [
        "s '|s'",
        " @-@ |-",
        " @,@ |,",
        " @.@ |.",
        " : |: ",
        " ; |; ",
        " . |. ",
        " ! |! ",
        " ? |? ",
        " , |, ",
        "()",
        "[]",
        "{}",
        '""',
        "''",
        "= = = =|====",
        "= = =|===",
        "= =|==",
        " \u00b0 |\u00b0",
        " \n|\n",
        "\n |\n",
        " N | 1 ",
        " 's|'s",
    ]
    for step in steps:
        if len(step) > 2:
            old, new = step.split("|")
            text = new.join(text.split(old))
            continue
        parts, rest = [], text
        while (begin := rest.find(step[0])) >= 0 and (end := rest.find(step[1], begin + 1)) >= 0:
            parts += [rest[:begin], step[0], rest[begin + 1 : end].strip(), step[1]]
            rest = rest[end + 1 :]
        text = "".join(parts) + rest
    return text


def test_words_of_the_published_file_are_counted_before_it_is_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "wiki.txt"
    path.write_text("one @-@ two three", encoding="utf-8")
    windows, words = read_perplexity_text(str(path), ByteTokenizer(), length=8, stride=4)
    assert words == 4 and bytes(windows.ids.tolist()) == b"one-two three"


def test_perplexities_are_those_of_the_definition() -> None:
    found = zeroshot.perplexity_metrics(2.0, 10, original_words=6)
    assert found == {
        "avg loss": 2.0,
        "ppl": pytest.approx(math.e**2),
        "adjusted ppl": pytest.approx(math.e**4),
        "token ratio": 2.0,
    }


def test_strict_passages_end_with_the_whole_last_word(tmp_path: Path) -> None:
    path = tmp_path / "lambada.jsonl"
    path.write_text(json.dumps({"text": "He sat on the old chair"}) + "\n", encoding="utf-8")
    (strict,) = read_lambada_passages([str(path)], ByteTokenizer(), length=64, strict=True)
    assert (bytes(strict.context), bytes(strict.continuation)) == (b"He sat on the old", b" chair")
    (loose,) = read_lambada_passages([str(path)], ByteTokenizer(), length=64, strict=False)
    assert (bytes(loose.context), bytes(loose.continuation)) == (b"He sat on the old chai", b"r")


@pytest.mark.parametrize("kind", ["Llama2Tokenizer", "HuggingFaceTokenizer", "GPTSentencePieceTokenizer"])
def test_what_a_tokenizer_puts_around_texts_is_never_the_word_to_predict(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "lambada.jsonl"
    path.write_text(json.dumps({"text": "He sat on the old chair"}) + "\n", encoding="utf-8")
    if kind == "HuggingFaceTokenizer":
        toy = package_tokenizer()
        toy.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>",
            pair="<s> $A $B",
            special_tokens=[(name, toy.token_to_id(name)) for name in ("<s>", "</s>")],
        )
        toy.save(str(tmp_path / "tokenizer.json"))
    model = tmp_path / "tokenizer.json" if kind == "HuggingFaceTokenizer" else ROOT / "examples/data/demo-llama.model"
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=str(model)))
    opening = [tokenizer.bos] * (kind != "GPTSentencePieceTokenizer")
    for strict in (True, False):
        (passage,) = read_lambada_passages([str(path)], tokenizer, length=64, strict=strict)
        beginning, word = passage.context, list(passage.continuation)
        assert [*beginning, *word] == [
            *opening,
            *encode_without_special_tokens(tokenizer, ["He sat on the old chair"])[0],
        ]
        assert tokenizer.detokenize(word).strip() == "chair" if strict else len(word) == 1
        assert word[-1] not in tokenizer.special_ids


def test_every_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lambada.jsonl"
    path.write_text('{"text": "1 2 3"}\nnot json\n{"other": 1}\n{"text": "5"}\n', encoding="utf-8")
    with pytest.raises(DataError) as caught:
        read_lambada_passages([str(path)], NullTokenizer(9), length=8, strict=True)
    assert all(f"{path}:{number}: " in str(caught.value) for number in (2, 3, 4))


@pytest.mark.parametrize(
    ("content", "said"), [(None, "cannot be read"), (b"\xff\xfe", "not UTF-8"), (b"x", "fewer than two tokens")]
)
def test_a_text_that_cannot_be_scored_is_named(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=said):
        read_perplexity_text(str(path), ByteTokenizer(), length=8, stride=4)
