#!/usr/bin/env python3
"""Pretrain a GPT: `torchrun --nproc_per_node N pretrain_gpt.py <flags>`; `--help` lists the flags in groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.cli.arguments import parse_args
from megatron.training.launch.launch_info import read_launch_info

if __name__ == "__main__":  # before torch is imported, so that --help and refusals answer at once
    PLACE = read_launch_info()
    CHECKED = parse_args(
        world_size=PLACE.size,
        speaks=PLACE.rank == 0,
        reads_data="datasets",
        defaults={"tokenizer_type": "GPT2BPETokenizer"},
    )

import torch

from megatron.core.config.plan.layers import StageSpec
from megatron.core.datasets.blend import build_gpt_datasets
from megatron.core.models.decoders import build_decoder
from megatron.core.models.gpt import GPTModel
from megatron.core.models.mtp import MTPLosses
from megatron.training.entry import guarded_entry_point
from megatron.training.initialize import initialize_megatron
from megatron.training.loader import Datasets
from megatron.training.loop import pretrain
from megatron.training.state.batch import Batch, Loss, LossFunction, language_loss_with_mtp
from megatron.training.state.run import RunContext
from megatron.training.state.trainer import Samples


def datasets_provider(run: RunContext, samples: tuple[int, int | None, int]) -> Datasets:
    """Return datasets of each split: windows of tokens, or with --sft conversations. samples: needed of each."""
    train, valid, test = samples
    return build_gpt_datasets(
        run.config.data,
        sequence_length=run.config.train.seq_length,
        seed=run.config.train.seed,
        train_samples=train,
        valid_samples=valid,
        test_samples=test,
        tokenizer=run.tokenizer,
    )


def model_provider(run: RunContext, stage: StageSpec) -> GPTModel:
    """Build one pipeline stage."""
    return build_decoder(stage, run.layer_build_context)


def forward_step(run: RunContext, batches: Iterator[Batch], stage: GPTModel) -> tuple[torch.Tensor, LossFunction]:
    """Run one microbatch through one stage. Return (message, or the loss of each token at the last; loss function)."""
    batch = next(batches)
    output = stage(
        ids=batch.token_ids_with_images,
        hidden=batch.hidden,
        labels=batch.masked_labels,
        positions=batch.positions,
        documents=batch.documents,
        microbatch_context=batch.microbatch_context,
        ahead=batch.mtp_inputs,
    )

    def microbatch_loss(losses: torch.Tensor | MTPLosses) -> Loss:
        return language_loss_with_mtp(losses, batch, run.config.model.mtp)

    return output, microbatch_loss


def make_eval_generate_function(run: RunContext, template: str | None = None) -> Samples:
    """Return the function that continues --eval-generate's prompts. template: of conversations; left out: as --sft."""
    # The engine, which a run that continues no prompts does without.
    from megatron.inference import eval_generate

    train, chat = run.config.train, run.config.data.chat
    assert train.eval_generate is not None, "nothing is continued without --eval-generate"
    prompts = eval_generate.read_prompts(
        train.eval_generate,
        run.tokenizer,
        num_tokens=train.eval_generate_tokens,
        seed=train.seed,
        temperature=train.eval_generate_temperature,
        positions=run.config.model.max_position_embeddings,
        template=template or (chat.sft_tokenizer_prompt_format if chat.sft else None),
    )

    def generate_samples(stages: Sequence[GPTModel]) -> list[tuple[str, str]]:
        return list(
            zip(prompts.texts, eval_generate.generate_continuation_texts(stages, run.tokenizer, prompts), strict=True)
        )

    return generate_samples


@guarded_entry_point
def main() -> None:
    """Initialize and train."""
    pretrain(initialize_megatron(CHECKED), datasets_provider, model_provider, forward_step, make_eval_generate_function)


if __name__ == "__main__":
    main()
