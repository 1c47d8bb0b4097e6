"""megatron explain-data against what real runs logged and fed to their models: layouts, blends, ramp-up, resume."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pretrain_gpt
from megatron.cli.commands.explain_data import main
from megatron.core.datasets.indexed import DataError, IndexedDataset
from megatron.core.kernels.choice.table import KernelRequirements, select_kernels
from megatron.core.tokenizers.build import NullTokenizer
from megatron.training.data.inspect_samples import MicrobatchDescription, ResumeCounters, RunDataInspector
from megatron.training.loop import pretrain
from megatron.training.state.batch import Batch
from megatron.training.state.run import RunContext
from tests.helpers import tiny
from tests.helpers.flags import parse_args_or_raise, run_config_of_args
from tests.helpers.programme import SEQUENCE, TINY, VOCABULARY, write_tokens
from tests.helpers.world import Worlds
from tests.unit.datasets.test_images import picture
from tests.unit.datasets.test_multimodal import row as image_row
from tests.unit.datasets.test_multimodal import write as write_images

FLAGS = [
    *TINY,
    *(
        "--global-batch-size 8 --train-iters 9 --eval-iters 1 --eval-interval 4 --rampup-batch-size 4 4 12 "
        "--reset-position-ids --reset-attention-mask --eod-mask-loss"
    ).split(),
]
Line = dict[str, Any]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The flags of a blend of two sources, one of which is small enough to be gone through several times."""
    folder = tmp_path_factory.mktemp("data")
    for name, documents in (("large", 60), ("small", 8)):
        write_tokens(folder / name, documents=documents, seed=documents)
    return ["--data-path", "0.7", str(folder / "large"), "0.3", str(folder / "small"), "--split", "60,20,20"]


def real_run(flags: list[str]) -> list[tuple[int, list[list[int]]]]:
    """Train on the ranks that there are. Returns what the first stage was fed: (iteration, tokens [b, s])."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    config = run_config_of_args(parse_args_or_raise(flags, world_size=ranks), ranks)
    config = replace(config, model=config.model.with_vocabulary(VOCABULARY + 1, config.parallel.tp))
    run = replace(
        tiny.run_of(config),
        tokenizer=NullTokenizer(VOCABULARY + 1),
        kernels=select_kernels(
            KernelRequirements(device="cpu", dtype=torch.float32, documents=True),
            {"attention": config.model.attention_backend},
        ),
    )
    fed: list[tuple[int, list[list[int]]]] = []

    def forward_step(run: RunContext, batches: Iterator[Batch], stage: Any) -> Any:
        batch = next(batches)
        if stage.training and stage.stage.has_embedding:
            fed.append((run.progress.iteration + 1, batch.tokens.tolist()))
        return pretrain_gpt.forward_step(run, iter((batch,)), stage)

    pretrain(run, pretrain_gpt.datasets_provider, pretrain_gpt.model_provider, forward_step)
    return fed


def explanation_of(flags: list[str], ranks: int, **options: Any) -> RunDataInspector:
    """What the tool would say about these flags."""
    return RunDataInspector(
        run_config_of_args(parse_args_or_raise(flags, world_size=ranks), ranks),
        NullTokenizer(VOCABULARY + 1),
        world_size=ranks,
        entry="gpt",
        **options,
    )


def logged(folder: Path) -> dict[tuple[str, int, int], list[Line]]:
    """(split, iteration, data-parallel rank) -> the lines of one rank; ranks of one place must agree."""
    found: dict[tuple[str, int, int], list[Line]] = {}
    for path in sorted(folder.iterdir()):
        own: dict[tuple[str, int, int], list[Line]] = {}
        for text in path.read_text().splitlines():
            line = json.loads(text)
            own.setdefault((line["split"], line["iteration"], line["data_rank"]), []).append(line)
        for key, lines in own.items():
            assert found.setdefault(key, lines) == lines, f"ranks of one place read differently: {key}"
    return found


def assert_explained(found: dict[tuple[str, int, int], list[Line]], explanation: RunDataInspector) -> None:
    """Every line of a log is what the explanation says, in order, and nothing is missing."""
    for (split, step, rank), lines in found.items():
        said = list(explanation.microbatches_of_step(split, step, [rank]))
        assert [(one.microbatch, [sample.sample for sample in one.samples], one.hash) for one in said] == [
            (line["microbatch"], line["samples"], line["hash"]) for line in lines
        ], (split, step, rank)


def tokens_of(microbatch: MicrobatchDescription) -> list[list[int]]:
    """The input ids of each sample, put together from the texts of its pieces."""
    rows = [[int(word) for piece in sample.pieces for word in piece.text.split()] for sample in microbatch.samples]
    return [row[:SEQUENCE] for row in rows]


LAYOUTS: dict[str, tuple[int, str]] = {
    "serial": (1, ""),
    "dp2": (2, ""),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "tp2-dp2": (4, "--tensor-model-parallel-size 2 --micro-batch-size 2"),
    "dp2-cyclic": (2, "--dataloader-type cyclic --rampup-batch-size 8 8 8"),
    "dp2-cyclic-unsharded": (2, "--dataloader-type cyclic --no-data-sharding --num-workers 2"),
    "dp4-pp1-exact": (4, "--blend-order exact"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_explained_step_is_what_the_run_read(world: Worlds, data: list[str], tmp_path: Path, name: str) -> None:
    ranks, changes = LAYOUTS[name]
    flags = [*FLAGS, *data, *changes.split(), "--log-samples", str(tmp_path)]
    fed = world(ranks).run(real_run, flags)
    found, explanation = logged(tmp_path), explanation_of(flags, ranks)
    assert_explained(found, explanation)
    data_ranks = explanation.num_ranks
    assert {key[:2] for key in found} == {
        *(("train", step) for step in range(1, 10)),
        ("valid", 4),
        ("valid", 8),
        ("valid", 9),
        ("test", 9),
    }
    assert {key[2] for key in found} == set(range(data_ranks))
    # The models' inputs, taken where they are computed with, are the documents that are named.
    said = sorted(
        (one.step, tokens_of(one)) for step in range(1, 10) for one in explanation.microbatches_of_step("train", step)
    )
    taken = {json.dumps(sorted(row)) for row in fed if row}
    assert sorted(pair for row in taken for pair in map(tuple, json.loads(row))) == said


def test_pieces_are_the_tokens_of_the_files(data: list[str]) -> None:
    explanation = explanation_of([*FLAGS, *data], 1)
    for microbatch in explanation.microbatches_of_step("train", 5):
        for sample in microbatch.samples:
            assert sum(piece.length for piece in sample.pieces) == SEQUENCE + 1
            for piece in sample.pieces:
                source = IndexedDataset(piece.prefix)
                ids = source.get(piece.sequence, piece.offset, piece.length)
                assert piece.text == " ".join(map(str, ids))
                assert source.document_indices[piece.document] == piece.sequence
            # A document ends with the id VOCABULARY, which has no loss as an input; what follows begins anew.
            ids = [int(word) for piece in sample.pieces for word in piece.text.split()]
            ends = [place for place, token in enumerate(ids[:SEQUENCE]) if token == VOCABULARY]
            lossy = {place for first, last in sample.loss for place in range(first, last)}
            assert lossy == set(range(SEQUENCE)) - set(ends)
            assert (
                sample.position_restarts == sample.attention_restarts == tuple(e + 1 for e in ends if e + 1 < SEQUENCE)
            )
            assert [piece.start for piece in sample.pieces[1:]] == [e + 1 for e in ends if e < SEQUENCE]


def test_a_run_that_resumes_under_another_layout_is_explained_by_its_flags_alone(
    world: Worlds, data: list[str], tmp_path: Path
) -> None:
    folder = ["--save", str(tmp_path / "save"), "--load", str(tmp_path / "save"), "--save-interval", "100"]
    first = [*FLAGS, *data, *folder, "--exit-interval", "5", "--log-samples", str(tmp_path / "first")]
    second = [*FLAGS, *data, *folder, "--log-samples", str(tmp_path / "second")]
    world(4).run(real_run, first)
    world(2).run(real_run, second)
    before, after = logged(tmp_path / "first"), logged(tmp_path / "second")
    assert {step for split, step, _ in before if split == "train"} == {1, 2, 3, 4, 5}
    assert {step for split, step, _ in after if split == "train"} == {6, 7, 8, 9}
    assert_explained(before, explanation_of(first, 4))
    assert_explained(after, explanation_of(second, 2))


def test_a_run_that_resumes_with_another_batch_is_explained_from_its_counters(
    world: Worlds, data: list[str], tmp_path: Path
) -> None:
    folder = ["--save", str(tmp_path / "save"), "--load", str(tmp_path / "save"), "--save-interval", "100"]
    constant = [*TINY, *data, *folder, *"--train-iters 9 --eval-iters 1 --eval-interval 4".split()]
    first = [*constant, "--exit-interval", "3", "--log-samples", str(tmp_path / "first")]
    second = [
        *constant,
        "--global-batch-size",
        "8",
        "--override-opt-param-scheduler",
        "--log-samples",
        str(tmp_path / "second"),
    ]
    world(1).run(real_run, first)
    world(1).run(real_run, second)
    assert_explained(logged(tmp_path / "first"), explanation_of(first, 1))
    assert_explained(logged(tmp_path / "second"), explanation_of(second, 1, start=ResumeCounters(3, 12, 0)))


def test_a_full_validation_sees_every_sample_once_and_is_explained(
    world: Worlds, data: list[str], tmp_path: Path
) -> None:
    prefixes = data[2:5:2]
    flags = [
        *FLAGS,
        "--train-data-path",
        prefixes[0],
        "--valid-data-path",
        *prefixes,
        "--full-validation",
        "--eval-iters",
        "0",
    ]
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        world(ranks).run(real_run, [*flags, "--log-samples", str(folder)])
        found, explanation = logged(folder), explanation_of(flags, ranks)
        size = len(explanation.dataset("valid"))
        assert size % 8, "the last global batch is not full"
        for step in (4, 8, 9):
            lines = [line for rank in range(ranks) for line in found["valid", step, rank]]
            samples = sorted(number for line in lines for number in line["samples"])
            assert samples == [-1] * (-size % 8) + list(range(size))
            said = [one for rank in range(ranks) for one in explanation.microbatches_of_step("valid", step, [rank])]
            assert [one.hash for one in said] == [line["hash"] for line in lines]
            assert all(not sample.loss for one in said for sample in one.samples if sample.sample is None)


@pytest.mark.parametrize("changes", ["", "--dataloader-type cyclic", "--rampup-batch-size 8 8 8"])
def test_a_document_is_seen_where_the_log_has_its_samples(data: list[str], changes: str) -> None:
    explanation = explanation_of([*FLAGS, *data, *changes.split()], 2)
    shown: dict[tuple[str, int], list[tuple[str, int, int, int, int]]] = {}
    for split, steps in (("train", range(1, 10)), ("valid", (4, 8, 9)), ("test", (9,))):
        for step in steps:
            for one in sorted(explanation.microbatches_of_step(split, step), key=lambda one: one.data_rank):
                for sample in one.samples:
                    for document in dict.fromkeys((piece.prefix, piece.document) for piece in sample.pieces):
                        shown.setdefault((split, *document), []).append(
                            (step, one.microbatch, one.data_rank, sample.sample)
                        )
    for split in ("train", "valid", "test"):
        for prefix in data[2:5:2]:
            for document in range(len(IndexedDataset(prefix))):
                found = explanation.occurrences(split, prefix, document)
                assert [(one.step, one.microbatch, one.data_rank, one.sample) for one in found] == shown.get(
                    (split, prefix, document), []
                ), (split, prefix, document)
    assert max(map(len, shown.values())) > 2, "some document is seen again and again"


def test_the_tool_answers_without_torch_as_a_person_or_a_programme_asks(data: list[str], tmp_path: Path) -> None:
    flags = [*FLAGS, *data, "--world-size", "2", "--step", "6"]
    code = "import sys, megatron.cli.commands.explain_data as tool; tool.main(sys.argv[1:]); assert 'torch' not in sys.modules, 'torch'"
    done = subprocess.run([sys.executable, "-c", code, *flags, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    said = list(explanation_of([*FLAGS, *data], 2).microbatches_of_step("train", 6))
    assert [(line["data_rank"], line["microbatch"], line["hash"]) for line in lines] == [
        (one.data_rank, one.microbatch, one.hash) for one in said
    ] and len(lines) == 8


def test_the_tool_prints_documents_loss_and_text(data: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main([*FLAGS, *data, "--step", "2", "--full-text"])
    out = capsys.readouterr().out
    [first, *_] = explanation_of([*FLAGS, *data], 1).microbatches_of_step("train", 2)
    assert (
        f"train step 2, microbatch 0, data-parallel rank 0: samples {first.samples[0].sample}, hash {first.hash}" in out
    )
    for piece in first.samples[0].pieces:
        assert f"{piece.prefix} document {piece.document}, " in out and json.dumps(piece.text) in out
    main([*FLAGS, *data, "--document", f"{data[2]}:3"])
    out = capsys.readouterr().out.splitlines()
    found = explanation_of([*FLAGS, *data], 1).occurrences("train", data[2], 3)
    assert (
        out[0] == f"{data[2]}:3 is seen {len(found)} times in the train data of this run" and len(out) == len(found) + 1
    )


def test_one_rank_sees_what_its_place_reads(data: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*FLAGS, *data, "--world-size", "4", "--tensor-model-parallel-size", "2", "--step", "6", "--json"]
    seen = []
    for rank in range(4):
        main([*flags, "--rank", str(rank)])
        seen.append(capsys.readouterr().out)
    assert seen[0] == seen[1] != seen[2] == seen[3]


@pytest.mark.parametrize(
    "words, message",
    [
        ("--step 0", "the run goes from iteration 1 to 9"),
        ("--step 10", "the run goes from iteration 1 to 9"),
        ("--step 5 --set valid", "the run reads no valid data then; it does after iteration 4, 8, 9"),
        ("--step 5 --rank 1", "the run has ranks 0 to 0"),
        ("--document nothing", "is not PREFIX:NUMBER"),
        ("--document elsewhere:3", "elsewhere is not a source of the train data"),
        ("--step 5 --dataloader-type external", "up to the script's own iterables"),
        ("--step 5 --no-such-flag", "--no-such-flag is not a flag"),
        ("--step 5 --resumed-at 1 2 3 4", "--resumed-at takes up to 3 numbers"),
        (
            "--step 5 --pipeline-model-parallel-size 3 --num-layers 3 --world-size 3 --rank 1 --no-reset-position-ids "
            "--no-reset-attention-mask",
            "is pipeline rank 1 and reads no text",
        ),
    ],
)
def test_questions_that_make_no_sense_are_answered_so(
    data: list[str], words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*FLAGS, *data, *words.split()])
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_a_document_that_is_not_there_is_refused(data: list[str]) -> None:
    with pytest.raises(DataError, match="has no document 99; it has documents 0 to 59"):
        explanation_of([*FLAGS, *data], 1).occurrences("train", data[2], 99)


def test_evaluations_of_a_run_without_training_begin_at_the_beginning(
    world: Worlds, data: list[str], tmp_path: Path
) -> None:
    flags = [*FLAGS, *data, "--skip-train", "--log-samples", str(tmp_path)]
    world(1).run(real_run, flags)
    found = logged(tmp_path)
    explanation = explanation_of(flags, 1)
    assert_explained(found, explanation)
    assert {key[:2] for key in found} == {("valid", 0), ("test", 0)}
    assert [line["samples"] for line in found["valid", 0, 0]] == [[number] for number in range(8)]


def test_masked_samples_show_where_they_came_from_and_what_is_left_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(chr(97 + place) for place in range(26))]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    flags = [
        *TINY,
        "--tokenizer-type",
        "BertWordPieceLowerCase",
        "--vocab-file",
        str(tmp_path / "vocab.txt"),
        "--train-iters",
        "3",
        "--seq-length",
        "64",
        "--mock-data",
        "--entry",
        "bert",
        "--step",
        "2",
        "--json",
    ]
    del flags[flags.index("--vocab-size") : flags.index("--vocab-size") + 2]
    main(flags)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    [sample] = lines[0]["samples"]
    assert len(lines) == 4 and sample["texts"]["text"].startswith("[CLS]") and "[MASK]" in sample["texts"]["text"]
    assert sample["loss"] and all(piece["text"] == "" and piece["prefix"] == "mock data" for piece in sample["pieces"])
    assert 64 >= sum(piece["length"] for piece in sample["pieces"]) > 30


def test_a_hybrid_reads_what_a_gpt_reads(data: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    pattern = ["--hybrid-layer-pattern", "M*|M-", "--mamba-head-dim", "8", "--mamba-num-groups", "2"]
    said = []
    for entry, flags in (("gpt", FLAGS), ("hybrid", [*FLAGS[2:], *pattern])):  # the first two are --num-layers
        main([*flags, *data, "--entry", entry, "--step", "3", "--json"])
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and len(said[0].splitlines()) > 1


def test_the_images_of_a_conversation_are_named_and_their_rows_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_images(tmp_path, [image_row("a.png", answer="cat"), image_row(answer="no")], a=picture(40, 20))
    flags = (
        "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 48 --micro-batch-size 2 --lr 1e-3 --split 1,0,0 "
        "--train-iters 1 --eval-iters 0 --tokenizer-type ByteTokenizer --tokenizer-prompt-format plain "
        "--vision-model-type clip --vision-num-layers 1 --vision-hidden-size 16 --vision-num-attention-heads 2 "
        "--img-h 8 --img-w 8 --patch-dim 4 --disable-vision-class-token"
    )
    main(["--entry", "vlm", *flags.split(), "--data-path", str(path), "--step", "1"])
    lines = capsys.readouterr().out
    assert f'{tmp_path}/a.png: "[image rows: 4]cat' in lines and '"no' in lines
