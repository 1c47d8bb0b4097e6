"""Prompts with images: the engine says what transformers says, whatever is decoded together, cut into passes or known before."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.config.settings.inference import InferenceConfig
from megatron.core.datasets.indexed import DataError
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.families import hf
from megatron.core.tokenizers.build import ByteTokenizer, NullTokenizer, build_tokenizer
from megatron.inference.engine import Engine
from megatron.inference.eval_generate import generate_continuation_texts, read_image_questions
from megatron.inference.image_prompts import ImagePromptWriter
from megatron.inference.requests import GenerationRequest
from megatron.inference.step_input import PromptImages
from megatron.training.checkpoint.inference_model import GPT, load_network
from tests.helpers import tiny
from tests.helpers.world import Worlds
from tests.unit.datasets.test_images import content, picture
from tests.unit.families.test_vision import IMAGE, llava_clip, network, saved
from tests.unit.inference.serving import engine_of, greedy, stages_on
from tests.unit.inference.serving import network as text_network

NEW = 12


def prompt(rows: int, images: np.ndarray, seed: int) -> tuple[tuple[int, ...], PromptImages]:
    """Random ids with all rows of some images in their midst."""
    random = np.random.default_rng(seed)
    total = rows * len(images)
    before, after = random.integers(0, IMAGE, 3 + seed), random.integers(0, IMAGE, 4)
    ids = np.concatenate((before, np.full(total, IMAGE), after))
    slots = np.full(len(ids), -1)
    slots[len(before) : len(before) + total] = np.arange(total)
    return tuple(ids.tolist()), PromptImages(images, tuple(slots.tolist()), images.tobytes()[:64])


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """transformers' LLaVA, and ours with the same weights."""
    folder = tmp_path_factory.mktemp("llava")
    model = saved(llava_clip, folder)
    return model, network(hf.open_hf_folder(folder))


def requests(model: Any, count: int = 3) -> list[GenerationRequest]:
    """Prompts with one or two images, each its own."""
    rows, random = model.build.model.vision.num_image_embeddings, np.random.default_rng(1)
    made = []
    for seed in range(count):
        images = random.standard_normal((1 + seed % 2, 3, 28, 28)).astype(np.float32)
        ids, given = prompt(rows, images, seed)
        made.append(greedy(ids, NEW, images=given))
    return made


def said(model: Any, request: GenerationRequest) -> list[int]:
    """What transformers says."""
    ids = torch.tensor([request.prompt])
    assert request.images is not None
    with torch.no_grad():
        answer = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            pixel_values=torch.from_numpy(request.images.images),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return answer[0, len(request.prompt) :].tolist()


@pytest.mark.parametrize("changes", [{}, {"tokens": 13, "together": 4}, {"sharing": True, "block": 4}], ids=str)
def test_texts_are_those_of_transformers_token_for_token(both: tuple[Any, Any], changes: dict[str, Any]) -> None:
    model, ours = both
    engine = engine_of(ours, **changes)
    asked = requests(ours)
    replies = engine.run([*asked, *asked])  # the second time their beginnings may be known
    for request, reply in zip([*asked, *asked], replies, strict=True):
        assert list(reply.ids) == said(model, request)


def test_the_keys_of_another_image_are_not_taken_for_those_of_the_same_ids(both: tuple[Any, Any]) -> None:
    model, ours = both
    engine = engine_of(ours, sharing=True, block=4)
    (first, *_) = requests(ours, 1)
    assert first.images is not None
    other = replace(first, images=replace(first.images, images=-first.images.images, digest=b"other"))
    answers = [list(engine.run([request])[0].ids) for request in (first, other, first)]
    assert answers == [said(model, request) for request in (first, other, first)] and answers[0] != answers[1]


def test_a_network_that_reads_no_images_refuses_them(both: tuple[Any, Any]) -> None:
    with pytest.raises(ConfigError, match="the network reads no images"):
        engine_of(text_network()).run([replace(requests(both[1], 1)[0], prompt=(1, 2, 3))])


def test_a_prompt_is_written_as_conversations_are_in_training(both: tuple[Any, Any]) -> None:
    model = both[1].build.model
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="ByteTokenizer"))
    prompts = ImagePromptWriter.from_model(model, tokenizer, {"sft_tokenizer_prompt_format": "plain"}, "llama2")
    messages = [{"role": "user", "content": "<image>What?"}]
    with pytest.raises(DataError, match="says <image> 1 times, and there are 0 images"):
        prompts.encode_prompt(messages, [])
    chat = ImagePromptWriter.from_model(model, tokenizer, {"sft_tokenizer_prompt_format": "llama2"})
    ids, images = chat.encode_prompt(messages, [content(picture(20, 30))])
    text = "".join(
        "#" if slot >= 0 else tokenizer.detokenize([token]) for token, slot in zip(ids, images.slots, strict=True)
    )
    assert text.endswith("[INST] " + "#" * model.vision.num_image_embeddings + "What? [/INST]")
    assert images.images.shape == (1, 3, 28, 28) and max(images.slots) == model.vision.num_image_embeddings - 1


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
}
SEEING: dict[str, Any] = {
    "vision_model_type": "clip",
    "img_h": 8,
    "img_w": 8,
    "patch_dim": 4,
    "disable_vision_class_token": True,
    "vision_num_layers": 2,
    "vision_hidden_size": 16,
    "vision_num_attention_heads": 2,
    "num_layers": 4,
    "init_method_std": 0.3,
}


def answered(changes: dict[str, Any]) -> list[tuple[tuple[int, ...], list[float | None]]] | None:
    """Ids and log-probabilities of the answers to prompts with images and without, on the first rank."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    stages = stages_on(size, **{**SEEING, **changes})
    settings = {"inference_dynamic_batching_block_size": 4, "inference_dynamic_batching_max_tokens": 16}
    engine = Engine(stages, NullTokenizer(tiny.VOCABULARY), InferenceConfig(**settings, inference_max_requests=4))
    if not engine.mesh.world.is_first:
        engine.run_as_follower()
        return None
    engine.heartbeat()
    random, asked = np.random.default_rng(1), [greedy((3, 1, 4), 8, logprobs=True)]
    for seed in range(4):
        images = random.standard_normal((1 + seed % 2, 3, 8, 8)).astype(np.float32)
        ids, given = prompt(4, images, seed)
        ids = tuple(token % tiny.VOCABULARY for token in ids)
        asked.append(greedy(ids, 8, images=given, logprobs=True))
    replies = engine.run(asked)
    engine.close()
    return [(tuple(reply.ids), [token.logprob for token in reply.tokens]) for reply in replies]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_answers_about_images_do_not_depend_on_the_layout(world: Worlds, layout: str) -> None:
    found, expected = world(2).run(answered, LAYOUTS[layout])[0], answered({})
    assert found is not None and expected is not None
    assert len({logprobs[0] for _, logprobs in expected}) == len(expected)
    for (ids, logprobs), (right, scores) in zip(found, expected, strict=True):
        assert ids == right and logprobs == pytest.approx(scores, abs=1e-5)


def test_answers_during_training_are_counted(tmp_path: Path) -> None:
    stages = stages_on(1, 257, **{**SEEING, "max_position_embeddings": 64, "seq_length": 64})
    tokenizer = ByteTokenizer()
    written = ImagePromptWriter.from_model(stages[0].build.model, tokenizer, {"sft_tokenizer_prompt_format": "plain"})
    (tmp_path / "a.png").write_bytes(content(picture(20, 30)))
    row = {"messages": [{"role": "user", "content": "<image>"}], "images": ["a.png"]}
    limits: dict[str, Any] = {"num_tokens": 4, "positions": 64, "temperature": 0.0, "seed": 1}
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps(row))
    (answer,) = generate_continuation_texts(stages, tokenizer, read_image_questions(str(path), written, None, **limits))
    rows = [{**row, "references": ["no", f" {answer} "]}, {**row, "references": ["other"]}, row]
    path.write_text("\n".join(map(json.dumps, rows)))
    questions = read_image_questions(str(path), written, None, **limits)
    answers = generate_continuation_texts(stages, tokenizer, questions)
    assert answers == [answer] * 3 and questions.count_exact_matches(answers) == (1, 2)
    for wrong, reason in (({**row, "images": ["b.png"]}, "cannot be opened"), ({"prompt": "x"}, "messages")):
        path.write_text(json.dumps(wrong))
        with pytest.raises(ConfigError, match=f"line 1 is no question about images.*{reason}"):
            read_image_questions(str(path), written, None, **limits)
    path.write_text(json.dumps(row))
    with pytest.raises(ConfigError, match="more than the 3 positions"):
        read_image_questions(str(path), written, None, **{**limits, "positions": 7})


def test_a_folder_prepares_images_as_its_processor_says(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    saved(llava_clip, tmp_path)
    side = {"height": 28, "width": 28}
    transformers.LlavaImageProcessorPil(size={"shortest_edge": 28}, crop_size=side, do_pad=True).save_pretrained(
        tmp_path
    )
    rows = hf.open_hf_folder(tmp_path).settings["true_vocab_size"]
    loaded = load_network(str(tmp_path), GPT, tokenizer={"tokenizer_type": "NullTokenizer", "vocab_size": rows})
    assert loaded.data_settings["image_aspect_ratio"] == "pad"
    transformers.BitImageProcessorPil(size={"shortest_edge": 56}, crop_size=side).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="says how images are prepared"):
        _ = loaded.data_settings
