#!/usr/bin/env python3
"""Pretrain a GPT: `torchrun --nproc_per_node N pretrain_gpt.py <flags>`; `--help` lists the flags in groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.training.cli.arguments import parse_args
from megatron.training.launch.launch_info import read_launch_info

if __name__ == "__main__":  # before torch is imported, so that --help and refusals answer at once
    PLACE = read_launch_info()
    ARGS = parse_args(
        world_size=PLACE.size,
        speaks=PLACE.rank == 0,
        reads_data="datasets",
        defaults={"tokenizer_type": "GPT2BPETokenizer"},
    )

import torch

from megatron.core.config.plan import StageSpec
from megatron.core.datasets.blend import build_datasets
from megatron.core.models.gpt import GPTModel
from megatron.core.models.mtp import MTPLosses
from megatron.inference.samples import continuations, read_prompts
from megatron.training.data.batch import Batch, Loss, LossFunction, language_loss
from megatron.training.entry import run_entry
from megatron.training.initialize import initialize_megatron
from megatron.training.loader import Datasets
from megatron.training.loop import pretrain
from megatron.training.run import Run
from megatron.training.trainer import Samples


def datasets(run: Run, samples: tuple[int, int | None, int]) -> Datasets:
    """Training, validation and test samples: windows of tokens, or with --sft conversations."""
    train, valid, test = samples
    return build_datasets(
        run.config.data,
        sequence_length=run.config.train.seq_length,
        seed=run.config.train.seed,
        train_samples=train,
        valid_samples=valid,
        test_samples=test,
        tokenizer=run.tokenizer,
    )


def model(run: Run, stage: StageSpec) -> GPTModel:
    """One pipeline stage."""
    return GPTModel(stage, run.build)


def forward_step(run: Run, batches: Iterator[Batch], stage: GPTModel) -> tuple[torch.Tensor, LossFunction]:
    """One microbatch through one stage; the last gives the loss of every token, and of those ahead."""
    batch = next(batches)
    output = stage(
        ids=batch.ids,
        hidden=batch.hidden,
        labels=batch.targets,
        positions=batch.positions,
        documents=batch.documents,
        microbatch_context=batch.microbatch_context,
        ahead=batch.future_labels,
    )

    def loss(losses: torch.Tensor | MTPLosses) -> Loss:
        return language_loss(losses, batch, run.config.model.mtp)

    return output, loss


def samples(run: Run, template: str | None = None) -> Samples:
    """What continues the prompts of --eval-generate. template: of conversations among them; left out: as --sft writes them."""
    train, chat = run.config.train, run.config.data.chat
    assert train.eval_generate is not None, "nothing is continued without --eval-generate"
    prompts = read_prompts(
        train.eval_generate,
        run.tokenizer,
        num_tokens=train.eval_generate_tokens,
        seed=train.seed,
        temperature=train.eval_generate_temperature,
        positions=run.config.model.max_position_embeddings,
        template=template or (chat.sft_tokenizer_prompt_format if chat.sft else None),
    )

    def continued(stages: Sequence[GPTModel]) -> list[tuple[str, str]]:
        return list(zip(prompts.texts, continuations(stages, run.tokenizer, prompts), strict=True))

    return continued


@run_entry
def main() -> None:
    """Initialize and train."""
    pretrain(initialize_megatron(ARGS), datasets, model, forward_step, samples)


if __name__ == "__main__":
    main()
