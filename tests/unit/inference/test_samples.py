"""Prompts continued in training: what is said is what the network says, under every layout, and training never notices."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.core.config.flags.declare import ConfigError
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel import collectives
from megatron.core.tokenizers.build import ByteTokenizer, NullTokenizer
from megatron.inference.cache import KVCache
from megatron.inference.eval_generate import EvaluationPrompts, generate_continuation_texts, read_prompts
from megatron.inference.sampling import SamplingParams
from megatron.training.state.evaluate import evaluation_mode
from megatron.training.state.step import train_step
from tests.helpers import tiny
from tests.helpers.programme import trained, write_tokens
from tests.helpers.training import held_weights, train_on
from tests.helpers.world import Worlds
from tests.unit.inference.serving import slowly

TEXTS = ("3 1 4", "7", "2 7 1 8 2 8")
WORDS = NullTokenizer(tiny.VOCABULARY)
MODEL: dict[str, Any] = {
    "fp64": True,
    "init_method_std": 0.4,
    "untie_embeddings_and_output_weights": True,
    "position_embedding_type": "rope",
}
NOISY: dict[str, Any] = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "recompute_granularity": "selective"},
    "pipeline": {
        "pipeline_model_parallel_size": 2,
        "num_virtual_stages_per_pipeline_rank": 2,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "sharded": {"use_torch_fsdp2": True},
    "data": {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "ddp_bucket_size": 3000,
    },
}
KINDS: dict[str, dict[str, Any]] = {
    "dense": NOISY,
    "experts": {
        "num_experts": 4,
        "moe_ffn_hidden_size": 24,
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
        "moe_aux_loss_coeff": (0.1,),
    },
    "ahead": {"mtp_num_layers": 1, **NOISY},
}


def prompts(**changes: Any) -> EvaluationPrompts:
    """Some, of which the likeliest continuation is asked for."""
    return EvaluationPrompts(
        **{
            "texts": TEXTS,
            "ids": tuple(tuple(map(int, text.split())) for text in TEXTS),
            "num_tokens": 6,
            "sampling": SamplingParams(0.0),
            "seed": 5,
            **changes,
        }
    )


def stretch(
    changes: dict[str, Any], samples: EvaluationPrompts | None
) -> tuple[list[float], list[Any], list[list[str]]]:
    """On every rank: losses of three steps (sums and counts) and the weights after them; what was said after each step, if anything is asked."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(size, **{**MODEL, **changes})))
    losses, said = list[float](), list[list[str]]()
    for _ in range(3):
        step = train_step(
            trainer, tiny.short_run_batches(trainer.run, trainer.progress.iteration)
        )  # which may leave weights on their way
        losses += collectives.all_reduce(step.losses["lm loss"].double(), trainer.run.mesh.world).tolist()
        if samples is not None:
            with evaluation_mode(trainer):
                said.append(generate_continuation_texts(trainer.stages, WORDS, samples))
    for parallel in trainer.parallels:
        parallel.finish_gather()
    return losses, held_weights(trainer), said


def same(found: list[Any], expected: list[Any]) -> bool:
    """Whether weights are equal in every bit."""
    return all(a[0] == b[0] and bool((a[3] == b[3]).all()) for a, b in zip(found, expected, strict=True))


def likeliest(model: GPTModel) -> list[str]:
    """What follows the prompts, the whole text computed anew for every token, to the end of the document if there is one."""
    texts = []
    for ids in prompts().ids:
        new = slowly(model, ids, 6)[0]
        texts.append(" ".join(map(str, new[: new.index(WORDS.eod)] if WORDS.eod in new else new)))
    return texts


@pytest.mark.parametrize("kind", KINDS)
def test_training_does_not_notice_samples(kind: str) -> None:
    plain, watched = stretch(KINDS[kind], None), stretch(KINDS[kind], prompts(sampling=SamplingParams(1.0)))
    assert watched[0] == plain[0] and same(watched[1], plain[1])
    assert len(watched[2]) == 3 and watched[2][0] != watched[2][2], "a network that has learnt says something else"


def pools() -> set[int]:
    """Caches that are alive."""
    return {id(thing) for thing in gc.get_objects() if type(thing) is KVCache}


def test_samples_are_what_the_network_says_and_leave_no_memory_behind() -> None:
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(**{**MODEL, **NOISY})))
    train_on(trainer, 1)
    gc.collect()
    before = pools()
    gc.disable()
    try:
        with evaluation_mode(trainer):
            found = generate_continuation_texts(trainer.stages, WORDS, prompts())
            expected = likeliest(trainer.stages[0])
        assert pools() <= before, "the cache is still there"
    finally:
        gc.enable()
    assert [text.strip() for text in found] == expected and trainer.stages[0].training


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_says_the_same_and_trains_on_unchanged(world: Worlds, name: str) -> None:
    changes, asked = {**LAYOUTS[name], **NOISY}, prompts()
    (losses, weights, said), (_, _, said_there) = world(2).run(stretch, changes, asked)
    (plain, plain_weights, _), _ = world(2).run(stretch, changes, None)
    assert losses == plain and same(weights, plain_weights) and said == said_there
    quiet = LAYOUTS[name]  # without dropout, which is drawn otherwise under other layouts
    assert world(2).run(stretch, quiet, asked)[0][2] == stretch({}, asked)[2]


def test_prompts_are_lines_and_what_cannot_be_continued_is_refused(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"num_tokens": 6, "positions": 10, "temperature": 0.5, "seed": 5}
    (tmp_path / "good").write_text("3 1 4\n\n  \n7\n")
    found = read_prompts(str(tmp_path / "good"), WORDS, **settings)
    assert found == EvaluationPrompts(("3 1 4", "7"), ((3, 1, 4), (7,)), 6, SamplingParams(0.5), 5)
    for text, said in (
        ("\n", "has no prompts"),
        ("1\n3 1 4 1 5\n", "line 2: 5 tokens and --eval-generate-tokens 6 are more than the 10"),
        ("a b\n", "line 1 cannot be read"),
    ):
        (tmp_path / "bad").write_text(text)
        with pytest.raises(ConfigError, match=said):
            read_prompts(str(tmp_path / "bad"), WORDS, **settings)
    with pytest.raises(ConfigError, match="--eval-generate .*nowhere"):
        read_prompts(str(tmp_path / "nowhere"), WORDS, **settings)


def test_a_conversation_is_written_as_in_training_and_its_answer_ends_where_the_template_ends_it(
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {"num_tokens": 6, "positions": 64, "temperature": 0.0, "seed": 5}
    (tmp_path / "prompts").write_text('{"messages": [{"role": "user", "content": "hi"}]}\nplain\n')
    letters = ByteTokenizer()
    found = read_prompts(str(tmp_path / "prompts"), letters, **settings, template="chatml")
    asked = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert found.texts == ("hi", "plain") and found.stop_words == ("<|im_end|>",)
    assert [letters.detokenize(ids) for ids in found.ids] == [asked, "plain"]
    assert (
        letters.detokenize(read_prompts(str(tmp_path / "prompts"), letters, **settings).ids[0])[:12] == '{"messages":'
    )
    for line, reason in (
        ("{", "Expecting"),
        ('{"prompt": "x"}', "messages"),
        ('{"messages": [{"role": 3}]}', "content"),
    ):
        (tmp_path / "bad").write_text(line)
        with pytest.raises(ConfigError, match=f"line 1 cannot be read: .*{reason}"):
            read_prompts(str(tmp_path / "bad"), letters, **settings, template="chatml")
    (tmp_path / "bad").write_text('{"messages": [{"role": "user", "content": "hi"}]}')
    with pytest.raises(ConfigError, match="line 1 is a conversation: .*chat template, and it has none"):
        read_prompts(str(tmp_path / "bad"), letters, **settings, template="tokenizer")


def test_a_run_shows_samples_at_every_evaluation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")
    flags = [
        *write_tokens(tmp_path / "walks"),
        "--train-iters",
        "5",
        "--eval-interval",
        "2",
        "--eval-iters",
        "1",
        "--hidden-dropout",
        "0.1",
    ]
    (tmp_path / "prompts").write_text("3 1 4\n7\n")

    def losses(log: Path, *more: str) -> list[Any]:
        trained([*flags, "--log-jsonl", str(log), *more])
        return [
            json.loads(line)["losses"]
            for line in log.read_text().splitlines()
            if json.loads(line)["kind"] in ("step", "validation")
        ]

    plain = losses(tmp_path / "plain")
    assert "sample 1" not in capsys.readouterr().out
    assert (
        losses(
            tmp_path / "log",
            "--eval-generate",
            str(tmp_path / "prompts"),
            "--eval-generate-tokens",
            "4",
            "--tensorboard-dir",
            str(tmp_path / "board"),
        )
        == plain
    )
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith(" sample ")]
    said = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines() if '"samples"' in line]
    assert [record["iteration"] for record in said] == [2, 4, 5]  # the last after the end of training
    assert all([sample["prompt"] for sample in record["samples"]] == ["3 1 4", "7"] for record in said)
    assert shown == [
        f" sample {number} at iteration {record['iteration']} | {sample['prompt']!r} -> {sample['text']!r}"
        for record in said
        for number, sample in enumerate(record["samples"], start=1)
    ]
    board = EventAccumulator(str(tmp_path / "board")).Reload()
    points = {name: board.Tensors(f"{name}/text_summary") for name in ("sample 1", "sample 2")}
    for number, (name, prompt) in enumerate((("sample 1", "3 1 4"), ("sample 2", "7"))):
        assert [(point.step, point.tensor_proto.string_val[0].decode()) for point in points[name]] == [
            (record["iteration"], "    " + prompt + record["samples"][number]["text"]) for record in said
        ]
