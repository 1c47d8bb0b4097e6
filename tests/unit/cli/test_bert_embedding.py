"""Embeddings: those of transformers' BertModel, in the order of the lines, whatever the batch; and what is refused."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.cli.commands import bert_embedding
from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.parallel.spec import param_spec_of
from megatron.core.tokenizers.build import build_tokenizer
from megatron.training.checkpoint.checkpointing import Checkpointer
from tests.helpers import tiny
from tests.helpers.world import Worlds
from tests.unit.models.test_bert import LAYERS, PUBLISHED, as_published

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

WORDS = "the state of union people war whale ship sea men is a king great nation year time law peace old new day man god".split()
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXTS = [" ".join(np.random.default_rng(number).choice(WORDS, 1 + number * 5 % 13)) for number in range(23)] + [""]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One device, one answer."""
    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")


def vocabulary(folder: Path) -> str:
    """A vocab.txt that is, with [BOS] and [EOS], as large as the tiny networks' vocabulary."""
    path = folder / "vocab.txt"
    unused = tiny.VOCABULARY - 2 - len(SPECIAL) - len(WORDS)
    path.write_text("\n".join([*SPECIAL, *WORDS, *(f"[unused{number}]" for number in range(unused))]) + "\n")
    return str(path)


def saved(folder: str, vocab: str, changes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Save a tiny BERT on all ranks. Returns this rank's weights."""
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    config = tiny.config(
        size,
        architecture="bert",
        num_layers=LAYERS,
        save=folder,
        tokenizer_type="BertWordPieceLowerCase",
        vocab_file=vocab,
        **{**PUBLISHED, **changes},
    )
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="BertWordPieceLowerCase", vocab_file=vocab))
    trainer = tiny.trainer_of(replace(tiny.run_of(config), tokenizer=tokenizer))
    weights = {}
    with torch.no_grad():
        for stage in trainer.stages:
            for param in stage.parameters():
                weights[param_spec_of(param).name] = param.add_(
                    0.1 * torch.randn(param.shape, generator=torch.Generator().manual_seed(3))
                )
    Checkpointer(trainer).save()
    return {name: value.detach() for name, value in weights.items()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Our checkpoint in `run`, and transformers' model with its weights."""
    folder = tmp_path_factory.mktemp("bert")
    weights = as_published(saved(str(folder / "run"), vocabulary(folder), {}))
    config = transformers.BertConfig(
        vocab_size=tiny.VOCABULARY,
        hidden_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        intermediate_size=128,
        max_position_embeddings=16,
    )
    model = transformers.BertModel(config).eval()
    model.load_state_dict(
        {name.removeprefix("bert."): value for name, value in weights.items() if name.startswith("bert.")}, strict=False
    )
    return folder, model


@torch.no_grad()
def theirs(model: Any, vocab: str, text: str, pooling: str) -> np.ndarray:
    """One text by transformers, without any padding."""
    words = Path(vocab).read_text().split()
    ids = [words.index(word) for word in ("[CLS]", *text.split()[:14], "[SEP]")]
    found = model(torch.tensor([ids]))
    hidden = found.last_hidden_state[0]
    return {"mean": hidden.mean(dim=0), "first": hidden[0], "pooled": found.pooler_output[0]}[pooling].numpy()


def lines(path: Path, texts: list[str], key: str = "text") -> str:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("pooling", bert_embedding.POOLINGS)
@pytest.mark.parametrize("batch_tokens", ["1", "40", "8192"])
def test_embeddings_are_those_of_transformers_in_any_batch(
    made: tuple[Path, Any], tmp_path: Path, pooling: str, batch_tokens: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, model = made
    output = tmp_path / "out" / "vectors.npy"
    bert_embedding.main(
        [
            "--load",
            str(folder / "run"),
            "--input",
            lines(tmp_path / "a.jsonl", TEXTS),
            "--output",
            str(output),
            "--pooling",
            pooling,
            "--batch-tokens",
            batch_tokens,
        ]
    )
    found = np.load(output)
    assert found.dtype == np.float32 and found.shape == (len(TEXTS), 32)
    expected = np.stack([theirs(model, str(folder / "vocab.txt"), text, pooling) for text in TEXTS])
    assert np.abs(expected[0] - expected[1]).max() > 0.05, "texts must differ"
    assert np.abs(found - expected).max() < 2e-5
    assert f"{len(TEXTS)} texts x 32 ({pooling})" in capsys.readouterr().out
    assert [path.name for path in output.parent.iterdir()] == ["vectors.npy"]


@pytest.mark.parametrize("own_tokenizer", [True, False])
@pytest.mark.parametrize("pooling", bert_embedding.POOLINGS)
def test_a_published_folder_has_the_embeddings_of_transformers(
    made: tuple[Path, Any], tmp_path: Path, pooling: str, own_tokenizer: bool
) -> None:
    folder, model = made
    model.save_pretrained(tmp_path / "published")
    vocab, output = str(folder / "vocab.txt"), tmp_path / "vectors.npy"
    flags = ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", vocab]
    if own_tokenizer:  # a tokenizer.json that puts [CLS] and [SEP] around every text
        flags = []
        words = {word: number for number, word in enumerate(Path(vocab).read_text().split())}
        transformers.BertTokenizerFast(vocab=words).save_pretrained(tmp_path / "published")
    bert_embedding.main(
        [
            "--load",
            str(tmp_path / "published"),
            "--input",
            lines(tmp_path / "a.jsonl", TEXTS),
            "--output",
            str(output),
            "--pooling",
            pooling,
            *flags,
        ]
    )
    expected = np.stack([theirs(model, vocab, text, pooling) for text in TEXTS])
    assert np.abs(np.load(output) - expected).max() < 2e-5


def test_the_layout_that_wrote_the_checkpoint_does_not_matter(world: Worlds, tmp_path: Path) -> None:
    vocab, found = vocabulary(tmp_path), []
    for name, ranks, changes in (("one", 1, {}), ("two", 2, {"tensor_model_parallel_size": 2})):
        config = {"norm_after_residual": False, "embedding_layernorm": False, "fp64": True, **changes}
        plain = {**config, "seed": 11}
        if ranks == 1:
            unchanged(str(tmp_path / name), vocab, plain)
        else:
            world(ranks).run(unchanged, str(tmp_path / name), vocab, plain)
        output = tmp_path / f"{name}.npy"
        bert_embedding.main(
            ["--load", str(tmp_path / name), "--input", lines(tmp_path / "a.jsonl", TEXTS), "--output", str(output)]
        )
        found.append(np.load(output))
    assert np.abs(found[0] - found[1]).max() < 1e-6 < np.abs(found[0]).max()


def unchanged(folder: str, vocab: str, changes: Mapping[str, Any]) -> None:
    """On every rank: save a tiny BERT as it is drawn."""
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    config = tiny.config(
        size, architecture="bert", save=folder, tokenizer_type="BertWordPieceLowerCase", vocab_file=vocab, **changes
    )
    Checkpointer(tiny.trainer_of(replace(tiny.run_of(config), tokenizer=build_tokenizer(config.tokenizer)))).save()


def test_rows_stand_for_lines_over_many_pieces_and_files(made: tuple[Path, Any], tmp_path: Path) -> None:
    many = [f"{WORDS[number % 20]} {WORDS[number // 20 % 20]}" for number in range(400)]
    (tmp_path / "b.txt").write_text("\n".join(["", *many[:3], "", ""]), encoding="utf-8")
    arguments = ["--load", str(made[0] / "run"), "--normalize", "--pooling", "first"]
    body = [lines(tmp_path / "a.jsonl", many, "body"), "--json-key", "body"]
    for name, inputs in (("whole", body), ("lines", [str(tmp_path / "b.txt")])):
        bert_embedding.main([*arguments, "--output", str(tmp_path / f"{name}.npy"), "--input", *inputs])
    whole, three = np.load(tmp_path / "whole.npy"), np.load(tmp_path / "lines.npy")
    assert len(whole) == 400 and np.allclose(np.linalg.norm(whole, axis=1), 1, atol=1e-5)
    assert np.allclose(whole[:3], three, atol=1e-5) and not np.allclose(whole[0], whole[1], atol=1e-2)


def test_memory_does_not_grow_with_the_input(
    made: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.core.datasets.ingest.lines.CHUNK_BYTES", 2000)
    given = bert_embedding.parse_arguments(["--load", str(made[0] / "run"), "--input", "-", "--output", "-"])
    embedder = bert_embedding.load_embedder(given)
    peaks = []
    for count in (200, 200, 3200):  # the first run warms up
        path = lines(tmp_path / f"{count}.jsonl", [TEXTS[number % 20] for number in range(count)])
        tracemalloc.start()
        bert_embedding.write_embeddings(
            embedder, [path], key="text", output=str(tmp_path / "out.npy"), refuse_long=False
        )
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < 1.3 * peaks[1] + 20_000, peaks
    assert np.load(tmp_path / "out.npy").shape == (3200, 32)


@pytest.mark.parametrize(
    ("content", "changes", "said"),
    [
        ('{"text": "a"}\nnot json\n{"other": 1}\n', [], "a.jsonl:2: not JSON"),
        ('{"text": "a"}\n{"other": 1}\n', [], "a.jsonl:2: no key 'text'"),
        ("\n\n", [], "there is no text"),
        ('{"text": "' + "a " * 40 + '"}', ["--long-texts", "refuse"], "text 1 is longer than 16 tokens"),
        ('{"text": "a"}', ["--seq-length", "17"], "--seq-length 17 is not between 3 and the network's 16 positions"),
        ('{"text": "a"}', ["--tokenizer-type", "ByteTokenizer"], "was trained with another tokenizer"),
        ('{"text": "a"}', ["--load", "nowhere"], "nowhere holds no checkpoint"),
    ],
    ids=str,
)
def test_what_cannot_be_embedded_is_named_and_leaves_no_file(
    made: tuple[Path, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str,
    changes: list[str],
    said: str,
) -> None:
    (tmp_path / "a.jsonl").write_text(content, encoding="utf-8")
    with pytest.raises(SystemExit) as caught:
        bert_embedding.main(
            [
                "--load",
                str(made[0] / "run"),
                "--input",
                str(tmp_path / "a.jsonl"),
                "--output",
                str(tmp_path / "x.npy"),
                *changes,
            ]
        )
    assert caught.value.code == 1 and said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl"]


def test_a_network_without_pooler_or_of_another_kind_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unchanged(str(tmp_path / "bare"), vocabulary(tmp_path), {"bert_binary_head": False})
    Checkpointer(tiny.trainer_of(tiny.run_of(tiny.config(save=str(tmp_path / "gpt"))))).save()
    for name, said in (
        ("bare", "has no pooler; choose --pooling mean or first"),
        ("gpt", "holds a GPT-like model; what is asked for is a BERT"),
    ):
        with pytest.raises(SystemExit):
            bert_embedding.main(
                ["--load", str(tmp_path / name), "--input", "x", "--output", "y", "--pooling", "pooled"]
            )
        assert said in capsys.readouterr().err
