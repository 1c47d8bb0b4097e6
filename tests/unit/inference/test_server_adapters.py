"""Adapters over HTTP: named as models, listed, loaded and unloaded while the server runs; and PEFT's own logits as the reference."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("fastapi", reason="fastapi is not installed; the extra `server` brings it")
pytest.importorskip("uvicorn", reason="uvicorn is not installed; the extra `server` brings it")

from megatron.adapters.files import LoadedAdapter
from megatron.cli.commands.serve import adapter_folders_by_name, make_adapter_opener
from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.settings.adapter import AdapterConfig
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.tokenizers.build import ByteTokenizer
from megatron.inference.engine import Engine
from megatron.inference.requests import GenerationRequest
from megatron.inference.sampling import SamplingParams
from megatron.training.checkpoint.inference_model import GPT, load_network
from tests.unit.inference.clients import NAME, Answer, bytes_engine, bytes_network, serving
from tests.unit.inference.serving import engine_of
from tests.unit.inference.test_adapters import adapter_of

FOLDERS = {
    "a": AdapterConfig(lora_rank=3),
    "b": AdapterConfig(lora_rank=2, dora=True),
    "wide": AdapterConfig(lora_rank=20),
}
GREEDY: dict[str, Any] = {"prompt": "hello", "max_tokens": 8, "temperature": 0.0, "ignore_eos": True}


def opened(folder: str) -> LoadedAdapter:
    if folder not in FOLDERS:
        raise CheckpointError(f"{folder} is no adapter of this network", ["it adapts nothing"])
    return adapter_of(bytes_network().build.model, FOLDERS[folder], seed=len(folder) + ord(folder[0]))


def alone(folder: str) -> str:
    """What an engine says without a server."""
    engine = engine_of(bytes_network.__wrapped__(), ByteTokenizer())
    if folder:
        engine.adapters.load("x", opened(folder))
    request = GenerationRequest(b"hello", 8, SamplingParams(0.0), ignore_eod=True, adapter="x" if folder else "")  # type: ignore[arg-type]
    return engine.run([request])[0].text


def test_adapters_are_models_that_come_and_go() -> None:
    engine = engine_of(bytes_network.__wrapped__(), ByteTokenizer(), max_lora_rank=16, max_loras=2)
    with serving(engine, open_adapter=opened, updates_adapters=True) as server:
        for name, folder in (("first", "a"), ("second", "b")):
            answer = server.ask("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})
            assert (answer.status, answer.text) == (200, f"Success: LoRA adapter '{name}' added successfully.")
        models = server.ask("GET", "/v1/models").json["data"]
        assert [(one["id"], one.get("parent")) for one in models] == [(NAME, None), ("first", NAME), ("second", NAME)]
        assert server.ask("GET", "/v1/models/second").json["id"] == "second"
        texts = {}
        for name in (NAME, "first", "second"):
            answer = server.complete(model=name, **GREEDY).json
            assert answer["model"] == name
            texts[name] = answer["choices"][0]["text"]
        assert texts == {NAME: alone(""), "first": alone("a"), "second": alone("b")} and len({*texts.values()}) == 3
        assert server.ask("POST", "/v1/unload_lora_adapter", {"lora_name": "first"}).status == 200
        assert server.complete(model="first", **GREEDY).status == 404
        assert server.ask("POST", "/v1/unload_lora_adapter", {"lora_name": "first"}).status == 404
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        assert server.converse(model="second", **chat).json["model"] == "second"


WRONG: dict[str, tuple[dict[str, Any], int, str]] = {
    "a folder that holds none": (
        {"lora_path": "nowhere"},
        400,
        "nowhere is no adapter of this network: it adapts nothing",
    ),
    "a high rank": ({"lora_path": "wide"}, 400, "cannot be served: its rank 20 is above --max-lora-rank 16"),
    "a name that is taken": ({"lora_name": "there"}, 400, "there is an adapter 'there' already"),
    "the name of the network": ({"lora_name": NAME}, 400, "is the name of the network"),
    "no name": ({"lora_name": ""}, 400, "needs a name"),
    "no path": ({"lora_path": None}, 400, "lora_path must be a string"),
    "another field": ({"lora_pth": "a"}, 400, "is lora_path meant"),
}


def test_what_cannot_be_served_gets_one_sentence() -> None:
    engine = engine_of(bytes_network.__wrapped__(), ByteTokenizer(), max_lora_rank=16)
    engine.adapters.load("there", opened("a"))
    with pytest.raises(CheckpointError, match="another engine"):
        engine_of(engine.runner.networks[0].stages[0], ByteTokenizer()).adapters.load("there", opened("a"))
    with serving(engine, open_adapter=opened, updates_adapters=True) as server:
        for name, (changes, status, words) in WRONG.items():
            body = {"lora_name": "new", "lora_path": "a", **changes}
            answer = server.ask("POST", "/v1/load_lora_adapter", body)
            message = answer.json["error"]["message"]
            assert answer.status == status and words in message and "\n" not in message, (name, message)
        assert engine.adapters.names == ("there",)
    with serving(bytes_engine(), open_adapter=opened) as server:
        for path in ("load", "unload"):
            answer = server.ask("POST", f"/v1/{path}_lora_adapter", {"lora_name": "x", "lora_path": "a"})
            assert answer.status == 403 and "--allow-runtime-lora-updating" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    "error", [KeyError("magnitude"), RuntimeError("\ud800 is half a pair"), MemoryError(), RecursionError(), OverflowError("int too large")]
)  # fmt: skip
def test_whatever_reading_a_folder_raises_is_its_own_calls_error(error: Exception) -> None:
    def fails(folder: str) -> LoadedAdapter:
        raise error

    with serving(
        engine_of(bytes_network.__wrapped__(), ByteTokenizer()), open_adapter=fails, updates_adapters=True
    ) as server:
        answer = server.ask("POST", "/v1/load_lora_adapter", {"lora_name": "new", "lora_path": "a"})
        assert answer.status == 400 and type(error).__name__ in answer.json["error"]["message"]
        assert server.complete(**GREEDY).status == 200


def test_an_error_while_an_adapter_is_set_leaves_the_server_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(bytes_network.__wrapped__(), ByteTokenizer())

    def fails(number: int, adapters: LoadedAdapter | None) -> None:
        if adapters is not None:
            raise RuntimeError("out of memory")

    with serving(engine, open_adapter=opened, updates_adapters=True) as server:
        with monkeypatch.context() as patched:
            patched.setattr(engine.runner.networks[0].adapters, "set_adapter", fails)
            answer = server.ask("POST", "/v1/load_lora_adapter", {"lora_name": "new", "lora_path": "a"})
        assert answer.status == 400 and "RuntimeError: out of memory" in answer.json["error"]["message"]
        assert server.complete(**GREEDY).json["choices"][0]["text"] == alone("")
        assert server.ask("POST", "/v1/load_lora_adapter", {"lora_name": "new", "lora_path": "a"}).status == 200


def test_names_of_adapters_on_the_command_line() -> None:
    def read(*words: str) -> dict[str, str]:
        return adapter_folders_by_name(SimpleNamespace(lora_modules=words, model_name="net", load="x"))  # type: ignore[arg-type]

    assert read("a=x/y", "b=z=1") == {"a": "x/y", "b": "z=1"}
    for words, message in ((("a",), "NAME=FOLDER"), (("a=x", "a=y"), "each name once"), (("net=x",), "another name")):
        with pytest.raises(ConfigError, match=message):
            read(*words)


def test_a_mixed_batch_gives_the_logits_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed; the extra `dev` brings it")
    transformers = pytest.importorskip("transformers")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(11)
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = transformers.LlamaConfig(vocab_size=50, max_position_embeddings=64, **sizes)
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "base")
    settings: dict[str, dict[str, Any]] = {
        "one": {"r": 4, "target_modules": "all-linear"},
        "two": {"r": 6, "target_modules": ["q_proj", "down_proj"], "use_dora": True},
    }
    for name, one in settings.items():
        made = peft.LoraConfig(lora_alpha=9, init_lora_weights=False, task_type="CAUSAL_LM", **one)
        model = peft.get_peft_model(model, made, name) if name == "one" else model
        if name != "one":
            model.add_adapter(name, made)
    model.save_pretrained(tmp_path)
    tokenizer = {"tokenizer_type": "NullTokenizer", "vocab_size": 49}
    loaded = load_network(str(tmp_path / "base"), GPT, tokenizer=tokenizer)
    engine = Engine(loaded.stages, loaded.tokenizer)
    reads = make_adapter_opener(loaded.source, loaded.config.model)
    for name in settings:
        engine.adapters.load(name, reads(str(tmp_path / name)))
    prompts = [tuple(torch.randint(0, 50, (6 + place,)).tolist()) for place in range(6)]
    names = ["", "one", "two"] * 2
    asked = [
        GenerationRequest(
            ids, 4, SamplingParams(0.0), prompt_logprobs=True, logprobs=True, ignore_eod=True, adapter=name
        )
        for ids, name in zip(prompts, names, strict=True)
    ]
    for request, reply in zip(asked, engine.run(asked), strict=True):
        text = torch.tensor([[*request.prompt, *reply.ids]])
        with torch.no_grad():
            if request.adapter:
                model.set_adapter(request.adapter)
                logits = model(text).logits
            else:
                with model.disable_adapter():
                    logits = model(text).logits
        expected = logits[0, :-1].log_softmax(-1).gather(1, text[0, 1:, None])[:, 0]
        found = [token.logprob for token in (*reply.prompt[1:], *reply.tokens)]
        assert found == pytest.approx(expected.tolist(), abs=1e-5)


DAMAGES: dict[str, Any] = {
    "no magnitudes": lambda config, tensors: [tensors.pop(name) for name in list(tensors) if "magnitude" in name],
    "short magnitudes": lambda config, tensors: tensors.update({name: one[:-1] for name, one in tensors.items() if "magnitude" in name}),
    "not finite": lambda config, tensors: [one.fill_(float("nan")) for one in tensors.values()],
    "an endless regex": lambda config, tensors: config.update(alpha_pattern={"([a-z0-9_.]+)+!": 3}),
    "a number without end": lambda config, tensors: config.update(r=10**400),
    "alpha that is none": lambda config, tensors: config.update(lora_alpha=float("nan")),
    "lists": lambda config, tensors: config.update(target_modules=[[]], rank_pattern=[1], bias=[]),
    "half a surrogate pair": lambda config, tensors: config.update({"\ud800": 1}),
    "a base that is a pipe": lambda config, tensors: config.update(base_model_name_or_path="PIPE"),
    "a high rank": lambda config, tensors: config.update(r=1 << 19),
}  # fmt: skip


def test_others_are_answered_whatever_a_folder_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed; the extra `dev` brings it")
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr("megatron.core.config.flags.bounded_regex._SECONDS", 0.5)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 257,
        "initializer_range": 0.5,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(max_position_embeddings=64, **sizes))
    model.save_pretrained(tmp_path / "base")
    made = peft.LoraConfig(
        r=4, target_modules=["q_proj"], use_dora=True, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    peft.get_peft_model(model, made).save_pretrained(tmp_path / "good")
    loaded = load_network(str(tmp_path / "base"), GPT, tokenizer={"tokenizer_type": "ByteTokenizer"})
    opener = make_adapter_opener(loaded.source, loaded.config.model, largest_rank=16)
    config = json.loads((tmp_path / "good/adapter_config.json").read_text())
    (tmp_path / "pipes").mkdir()
    os.mkfifo(tmp_path / "pipes/config.json")
    with serving(Engine(loaded.stages, loaded.tokenizer), open_adapter=opener, updates_adapters=True) as server:

        def load(name: str) -> Answer:
            return server.ask("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(tmp_path / name)})

        assert load("good").status == 200
        texts = [server.complete(model=name, **GREEDY).json["choices"][0]["text"] for name in (NAME, "good")]
        assert texts[0] != texts[1]
        for what, damage in DAMAGES.items():
            (tmp_path / what).mkdir()
            wrong, tensors = dict(config), load_file(tmp_path / "good/adapter_model.safetensors")
            damage(wrong, tensors)
            text = json.dumps(wrong).replace("PIPE", str(tmp_path / "pipes"))
            (tmp_path / what / "adapter_config.json").write_text(text)
            save_file(
                {name: one.contiguous() for name, one in tensors.items()}, tmp_path / what / "adapter_model.safetensors"
            )
            answer = load(what)
            assert answer.status == 400, (what, answer.text)
            assert [
                server.complete(model=name, **GREEDY).json["choices"][0]["text"] for name in (NAME, "good")
            ] == texts
        assert [one["id"] for one in server.ask("GET", "/v1/models").json["data"]] == [NAME, "good"]
