#!/usr/bin/env python3
"""Train a language model that reads images: `torchrun --nproc_per_node N pretrain_vlm.py <flags>`; `--help` lists the flags in groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from megatron.training.cli.arguments import parse_args
from megatron.training.launch.launch_info import read_launch_info

DEFAULTS = {"tokenizer_type": "HuggingFaceTokenizer", "vision_model_type": "clip", "sft": True}

if __name__ == "__main__":  # before torch is imported, so that --help and refusals answer at once
    PLACE = read_launch_info()
    ARGS = parse_args(world_size=PLACE.size, speaks=PLACE.rank == 0, reads_data="datasets", defaults=DEFAULTS)

from megatron.core.config.stages import stages_of
from megatron.core.datasets.blend import build_splits
from megatron.core.datasets.multimodal import Use, image_chat_kind
from megatron.core.models.gpt import GPTModel
from megatron.evaluation.online import online_evaluation
from megatron.inference.image_prompts import ImagePrompts
from megatron.inference.samples import continuations, read_questions
from megatron.training.entry import run_entry
from megatron.training.initialize import initialize_megatron
from megatron.training.loader import Datasets
from megatron.training.loop import pretrain
from megatron.training.run import Run
from megatron.training.trainer import Evaluate, Samples
from pretrain_gpt import forward_step, model

SHOWN = 8  # answers in the log of an evaluation


def datasets(run: Run, samples: tuple[int, int | None, int]) -> Datasets:
    """Training, validation and test conversations, with the images that this rank's stages ask for."""
    stages = [stage for stage in stages_of(run.config) if stage.rank == run.mesh.pp.rank]
    use: Use = "check" if any(stage.has_output for stage in stages) else "nothing"
    if any(stage.has_embedding for stage in stages):
        use = "pixels"
    return build_splits(run.config.data, image_chat_kind(run.config, run.tokenizer, use), samples)


def image_prompts(run: Run) -> ImagePrompts:
    """What writes questions as conversations are written in training."""
    data = run.config.data
    return ImagePrompts.from_model(run.config.model, run.tokenizer, {**asdict(data.multimodal), **asdict(data.chat)})


def benchmark(run: Run, path: str) -> tuple[str, Evaluate]:
    """What --online-evaluation-config asks for."""
    config = run.config
    positions, save = config.model.max_position_embeddings, config.checkpoint.save
    return online_evaluation(
        path, image_prompts(run), run.tokenizer, positions=positions, seed=config.train.seed, save=save
    )


def samples(run: Run) -> Samples:
    """What answers the questions of --eval-generate, and counts the right answers."""
    train, data = run.config.train, run.config.data
    assert train.eval_generate is not None, "nothing is answered without --eval-generate"
    questions = read_questions(
        train.eval_generate,
        image_prompts(run),
        data.multimodal.image_folder,
        num_tokens=train.eval_generate_tokens,
        seed=train.seed,
        temperature=train.eval_generate_temperature,
        positions=run.config.model.max_position_embeddings,
    )

    def answered(stages: Sequence[GPTModel]) -> list[tuple[str, str]]:
        answers = continuations(stages, run.tokenizer, questions)
        right, number = questions.count_correct(answers)
        first = list(zip(questions.texts, answers))[:SHOWN]
        return (
            [*first, ("accuracy", f"{100 * right / number:.2f} % of {number} answers are right")] if number else first
        )

    return answered


@run_entry
def main() -> None:
    """Initialize and train."""
    pretrain(initialize_megatron(ARGS), datasets, model, forward_step, samples, benchmark=benchmark)


if __name__ == "__main__":
    main()
