"""Chat about images over HTTP: data URLs become the prompt that the engine would be given, within limits."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed; the extra `server` brings it")
pytest.importorskip("uvicorn", reason="uvicorn is not installed; the extra `server` brings it")

from megatron.core.models.gpt import GPTModel
from megatron.core.tokenizers.build import ByteTokenizer
from megatron.inference.image_prompts import KEPT_FILES, ImagePromptWriter
from megatron.inference.requests import GenerationRequest
from megatron.inference.sampling import SamplingParams
from megatron.inference.server.serving import RequestLimits
from tests.unit.datasets.test_images import bomb, content, picture
from tests.unit.inference.clients import Running, bytes_engine, serving
from tests.unit.inference.serving import engine_of, stages_on

VISION: dict[str, Any] = {
    "vision_model_type": "clip",
    "img_h": 8,
    "img_w": 8,
    "patch_dim": 4,
    "disable_vision_class_token": True,
    "vision_num_layers": 1,
    "vision_hidden_size": 16,
    "vision_num_attention_heads": 2,
    "init_method_std": 0.3,
    "max_position_embeddings": 256,
    "seq_length": 256,
}


@cache
def network() -> GPTModel:
    """A network that reads images, whose words are bytes."""
    return stages_on(1, 257, **VISION)[0]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server of a network that reads images."""
    model = network()
    engine = engine_of(model, ByteTokenizer())
    prompts = ImagePromptWriter.from_model(
        model.build.model, engine.tokenizer, {"sft_tokenizer_prompt_format": "chatml"}
    )
    engine.image_prompts = replace(prompts, options=replace(prompts.options, max_pixels=10_000, max_bytes=90_000))
    with serving(engine, limits=RequestLimits(body_bytes=400_000, images=2)) as running:
        yield running


def url(file: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


def parts(text: str, *files: bytes) -> list[dict[str, Any]]:
    return [
        *({"type": "image_url", "image_url": {"url": url(file), "detail": "auto"}} for file in files),
        {"type": "text", "text": text},
    ]


def said(server: Running, content: Any, **more: Any) -> Any:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0, **more}
    return server.converse(**body)


def test_an_image_in_a_chat_is_answered_as_the_engine_answers_it(server: Running) -> None:
    engine = server.service.engine
    assert engine.image_prompts is not None
    answers = set()
    for size in ((20, 30), (30, 20)):
        file = content(picture(*size))
        ids, images = engine.image_prompts.encode_prompt([{"role": "user", "content": "<image>What?"}], [file])
        answer = said(server, parts("What?", file), logprobs=True, top_logprobs=2)
        assert answer.status == 200, answer
        score = answer.json["choices"][0]["logprobs"]["content"][0]["logprob"]
        request = GenerationRequest(ids, 8, SamplingParams(0.0), images=images, logprobs=True)
        (reply,) = engine_of(network(), ByteTokenizer()).run([request])
        assert answer.json["usage"]["prompt_tokens"] == len(ids)
        assert score == pytest.approx(reply.tokens[0].logprob, abs=1e-6)
        answers.add(round(score, 6))
    assert len(answers) == 2  # it saw the difference
    assert server.ask("GET", "/v1/models").json["data"][0]["input_modalities"] == ["text", "image"]


def test_text_alone_and_several_images_are_served_too(server: Running) -> None:
    file = content(picture(20, 30))
    for asked in ("What?", parts("Which?", file, file)):
        answer = said(server, asked)
        assert answer.status == 200 and answer.json["choices"][0]["message"]["content"] is not None


WRONG: dict[str, tuple[Any, int, str]] = {
    "an address": ([{"type": "image_url", "image_url": {"url": "http://x/y.png"}}], 400, "must be a data URL"),
    "a file": ([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}], 400, "must be a data URL"),
    "no image": (parts("?", b"no image"), 400, "it is no image"),
    "a bomb": (parts("?", bomb()), 400, "more than 10000"),
    "pixels": (parts("?", content(picture(200, 100))), 400, "200 x 100 pixels, more than 10000"),
    "cut off": (parts("?", content(picture(60, 60), "JPEG")[:700]), 400, "it is damaged"),
    "bytes": (parts("?", content(picture(9, 9)) + bytes(90_000)), 400, "more than 90000 bytes"),
    "too many": (parts("?", *[content(picture(9, 9))] * 3), 413, "takes 2 in a call"),
    "not base64": ([{"type": "image_url", "image_url": "data:image/png;base64,!!"}], 400, "not base64"),
    "forged": ("<image>", 400, "says <image> 1 times, and there are 0 images"),
    "forged beside one": (parts("<image>", content(picture(9, 9))), 400, "2 times, and there are 1 images"),
    "sound": ([{"type": "input_audio"}], 400, "of the types text and image_url"),
    "number": ([{"type": "text", "text": 3}], 400, "of the types text and image_url"),
    "nothing": ([], 400, "a string, or a list of parts"),
    "in the system's words": (None, 400, "a string, or a list of parts"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_image_or_beyond_a_limit_is_refused_with_a_message(server: Running, name: str) -> None:
    asked, status, message = WRONG[name]
    answer = said(server, asked)
    assert answer.status == status and message in answer.json["error"]["message"], answer.text


def test_a_network_without_an_encoder_refuses_images() -> None:
    with serving(bytes_engine()) as running:
        answer = said(running, parts("?", content(picture(9, 9))))
        assert answer.status == 400 and "reads no images" in answer.json["error"]["message"]
        assert "input_modalities" not in running.ask("GET", "/v1/models").json["data"][0]


def test_files_that_come_again_are_not_unpacked_again(server: Running) -> None:
    prompts = server.service.engine.image_prompts
    assert prompts is not None
    prompts.cache.clear()
    files = [content(picture(9, 10 + number)) for number in range(KEPT_FILES + 2)]
    messages = [{"role": "user", "content": "<image>"}]
    first = prompts.encode_prompt(messages, [files[0]])[1]
    kept = next(iter(prompts.cache.values()))
    assert (
        prompts.encode_prompt(messages, [files[0]])[1].digest == first.digest
        and next(iter(prompts.cache.values())) is kept
    )
    for file in files:
        prompts.encode_prompt(messages, [file])
    assert len(prompts.cache) == KEPT_FILES
