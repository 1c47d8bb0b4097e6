#!/usr/bin/env python3
"""Train a language model that reads images: `torchrun --nproc_per_node N pretrain_vlm.py <flags>`; `--help` lists the flags in groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from megatron.cli.arguments import parse_args
from megatron.training.launch.launch_info import read_launch_info

DEFAULTS = {"tokenizer_type": "HuggingFaceTokenizer", "vision_model_type": "clip", "sft": True}

if __name__ == "__main__":  # before torch is imported, so that --help and refusals answer at once
    PLACE = read_launch_info()
    CHECKED = parse_args(world_size=PLACE.size, speaks=PLACE.rank == 0, reads_data="datasets", defaults=DEFAULTS)

from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.datasets.blend import build_split_datasets
from megatron.core.datasets.multimodal import Use, make_image_chat_dataset_kind
from megatron.core.models.gpt import GPTModel
from megatron.evaluation.online import build_online_evaluation
from megatron.inference.eval_generate import generate_continuation_texts, read_image_questions
from megatron.inference.image_prompts import ImagePromptWriter
from megatron.training.entry import guarded_entry_point
from megatron.training.initialize import initialize_megatron
from megatron.training.loader import Datasets
from megatron.training.loop import pretrain
from megatron.training.state.run import RunContext
from megatron.training.state.trainer import Evaluate, Samples
from pretrain_gpt import forward_step, model_provider

SHOWN = 8  # answers in the log of an evaluation


def datasets_provider(run: RunContext, samples: tuple[int, int | None, int]) -> Datasets:
    """Return datasets of conversations, with the images as far as this rank's stages need them."""
    stages = [stage for stage in stage_specs_of_run(run.config) if stage.rank == run.mesh.pp.rank]
    use: Use = "check" if any(stage.has_output for stage in stages) else "nothing"
    if any(stage.has_embedding for stage in stages):
        use = "pixels"
    return build_split_datasets(run.config.data, make_image_chat_dataset_kind(run.config, run.tokenizer, use), samples)


def make_image_prompt_writer(run: RunContext) -> ImagePromptWriter:
    """Return a writer of prompts in the format of this run's training conversations."""
    data = run.config.data
    return ImagePromptWriter.from_model(
        run.config.model, run.tokenizer, {**asdict(data.multimodal), **asdict(data.chat)}
    )


def make_online_evaluation(run: RunContext, path: str) -> tuple[str, Evaluate]:
    """Return (task name, evaluation) of --online-evaluation-config. path: of its file."""
    config = run.config
    positions, save = config.model.max_position_embeddings, config.checkpoint.save
    return build_online_evaluation(
        path, make_image_prompt_writer(run), run.tokenizer, positions=positions, seed=config.train.seed, save=save
    )


def make_eval_generate_function(run: RunContext) -> Samples:
    """Return the function that answers the questions of --eval-generate, and counts the right answers."""
    train, data = run.config.train, run.config.data
    assert train.eval_generate is not None, "nothing is answered without --eval-generate"
    questions = read_image_questions(
        train.eval_generate,
        make_image_prompt_writer(run),
        data.multimodal.image_folder,
        num_tokens=train.eval_generate_tokens,
        seed=train.seed,
        temperature=train.eval_generate_temperature,
        positions=run.config.model.max_position_embeddings,
    )

    def answer_questions(stages: Sequence[GPTModel]) -> list[tuple[str, str]]:
        answers = generate_continuation_texts(stages, run.tokenizer, questions)
        right, number = questions.count_exact_matches(answers)
        first = list(zip(questions.texts, answers))[:SHOWN]
        return (
            [*first, ("accuracy", f"{100 * right / number:.2f} % of {number} answers are right")] if number else first
        )

    return answer_questions


@guarded_entry_point
def main() -> None:
    """Initialize and train."""
    pretrain(
        initialize_megatron(CHECKED),
        datasets_provider,
        model_provider,
        forward_step,
        make_eval_generate_function,
        benchmark=make_online_evaluation,
    )


if __name__ == "__main__":
    main()
