"""generation_config.json: every field of transformers' is read, harmless or refused by name, and what is read acts as there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.tokenizers import generation_config
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.generation_config import GenerationDefaults, read_generation_defaults
from megatron.evaluation.likelihood import EvaluationBatchLimits, GenerationPrompt, generate_without_kv_cache
from megatron.inference.engine import Engine
from megatron.inference.requests import GenerationRequest
from megatron.inference.sampling import SamplingParams, apply_repetition_penalty, sampling_probabilities
from megatron.training.checkpoint.inference_model import GPT, load_network

GREEDY = SamplingParams(temperature=0.0)
PROMPT = (3, 14, 15)


def written(folder: Path, config: dict[str, Any] | None, model: dict[str, Any] | None = None) -> Path:
    """A folder with these two files."""
    for name, content in (("generation_config.json", config), ("config.json", model)):
        if content is not None:
            (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A tiny Llama with a tokenizer whose texts are ids, and transformers' model."""
    from tests.helpers.tokenizer_kinds import byte_level

    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=262,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.5,
        eos_token_id=257,
        bos_token_id=256,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}', encoding="utf-8")
    return folder, model


def continuation(model: Any, **given: Any) -> list[int]:
    """What transformers' `generate` adds to the prompt."""
    ids = torch.tensor([PROMPT])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, pad_token_id=0, **given)
    return made[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("where", ["generation_config.json", "config.json", "the decoder's part of config.json"])
def test_each_of_several_end_ids_ends_a_text_as_in_transformers(
    network: tuple[Path, Any], tmp_path: Path, where: str
) -> None:
    folder, model = network
    free = continuation(model, do_sample=False, eos_token_id=None)
    ends = [257, free[5]]
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").unlink()
    saved = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    if where == "generation_config.json":
        written(tmp_path, {"eos_token_id": ends})
    elif where == "config.json":
        written(tmp_path, None, {**saved, "eos_token_id": ends})
    else:
        assert read_generation_defaults(written(tmp_path, None, {"text_config": {"eos_token_id": ends}})).end_ids == (
            257,
            free[5],
        )
        return
    theirs = continuation(transformers.LlamaForCausalLM.from_pretrained(tmp_path), do_sample=False)
    loaded = load_network(str(tmp_path), GPT)
    (reply,) = Engine(loaded.stages, loaded.tokenizer).run([GenerationRequest(PROMPT, 12, GREEDY)])
    assert theirs == [*reply.ids, free[5]] == free[:6] and reply.reason == "stop"
    (reply,) = Engine(loaded.stages, loaded.tokenizer).run([GenerationRequest(PROMPT, 12, GREEDY, ignore_eod=True)])
    assert list(reply.ids) == free
    # without a cache, as the evaluation harness decodes
    prompt = GenerationPrompt(PROMPT, 12, lambda new: False)
    assert generate_without_kv_cache(loaded, [prompt], size=EvaluationBatchLimits(1)) == [theirs]
    # and with the ids of the tokenizer's folder, as a run that began with it decodes
    run = build_tokenizer(TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path)))
    (reply,) = Engine(loaded.stages, run).run([GenerationRequest(PROMPT, 12, GREEDY)])
    assert [*reply.ids, free[5]] == theirs


FILES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "sampling": {"do_sample": True},
    "llama 3": {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [128001, 128008, 128009]},
    "qwen 2.5": {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
    "gemma 3": {"do_sample": True, "top_k": 64, "top_p": 0.95, "cache_implementation": "hybrid"},
    "min p": {"do_sample": True, "min_p": 0.1, "top_k": 0},
    "greedy with limits": {"temperature": 0.6, "top_p": 0.9, "top_k": 5, "typical_p": 0.9, "repetition_penalty": 1.3},
    "greedy": {"do_sample": False},
}


@pytest.mark.parametrize("name", FILES)
def test_requests_are_sampled_from_the_distribution_of_transformers(
    network: tuple[Path, Any], tmp_path: Path, name: str
) -> None:
    _, model = network
    config = transformers.GenerationConfig.from_pretrained(
        written(tmp_path, {**FILES[name], "transformers_version": "5"})
    )
    model.generation_config = config
    prepared, _ = model._prepare_generation_config(None)
    model._prepare_special_tokens(prepared, device=torch.device("cpu"))
    processors = model._get_logits_processor(prepared, input_ids_seq_length=3, encoder_input_ids=torch.tensor([PROMPT]))
    torch.manual_seed(1)
    logits = 3 * torch.randn(50, 262)
    theirs = processors(torch.tensor([PROMPT] * 50), logits.clone())
    expected = theirs.softmax(-1) if prepared.do_sample else torch.eye(262)[theirs.argmax(-1)]
    defaults = read_generation_defaults(tmp_path)
    sampling = SamplingParams(**{**({} if prepared.do_sample else {"temperature": 0.0}), **defaults.sampling})  # type: ignore[arg-type]
    assert defaults.problems == () and ("temperature" in defaults.sampling) == ("do_sample" in FILES[name])
    penalized = torch.stack(
        [apply_repetition_penalty(row, torch.tensor(PROMPT), sampling.repetition_penalty) for row in logits]
    )
    assert (sampling_probabilities(penalized, sampling) - expected).abs().max() < 1e-5


# A value of every field at which transformers would generate otherwise than without it, or by which it fails.
OTHER: dict[str, Any] = {
    "min_length": 5, "min_new_tokens": 5, "max_time": 1.0, "num_beams": 2, "top_h": 0.4, "typical_p": 0.9,
    "epsilon_cutoff": 0.1, "eta_cutoff": 0.1, "encoder_repetition_penalty": 1.2, "no_repeat_ngram_size": 2,
    "bad_words_ids": [[3]], "forced_bos_token_id": 3, "forced_eos_token_id": 3,
    "exponential_decay_length_penalty": [3, 1.2], "suppress_tokens": [3], "begin_suppress_tokens": [3],
    "sequence_bias": [[[3], 2.0]], "token_healing": True, "guidance_scale": 2.0,
    "watermarking_config": {"bias": 2.0}, "encoder_no_repeat_ngram_size": 2, "assistant_ensemble_weight": 0.5,
    "penalty_alpha": 0.5, "dola_layers": "low", "diversity_penalty": 0.5, "num_beam_groups": 2, "constraints": [3],
    "force_words_ids": [[3]], "chat_format": "chatml",
}  # fmt: skip
READ = "do_sample temperature top_k top_p min_p repetition_penalty eos_token_id max_new_tokens stop_strings".split()


def test_every_field_of_transformers_is_read_harmless_or_refused() -> None:
    fields = {name for name in vars(transformers.GenerationConfig()) if not name.startswith("_")}
    assert fields - set(READ) - set(OTHER) - set(generation_config._HARMLESS) == set()


@pytest.mark.parametrize("name", OTHER)
def test_what_has_no_counterpart_is_refused_by_name_with_the_way_out(tmp_path: Path, name: str) -> None:
    defaults = read_generation_defaults(
        written(tmp_path, {"do_sample": True, "eos_token_id": [1, 2], name: OTHER[name]})
    )
    with pytest.raises(ConfigError, match=rf"generation_config.json: {name}: .* --generation-config none"):
        defaults.for_requests("auto", "here")
    assert defaults.for_requests("none", "here") == GenerationDefaults((1, 2))


@pytest.mark.parametrize(
    "config",
    [
        {"do_sample": "yes"},
        {"do_sample": True, "temperature": 0.0},
        {"do_sample": True, "top_k": -1},
        {"do_sample": True, "top_k": 2.5},
        {"do_sample": True, "top_p": 1.5},
        {"do_sample": True, "min_p": -1},
        {"repetition_penalty": 0},
        {"max_new_tokens": 0},
        {"stop_strings": [3]},
    ],
    ids=str,
)
def test_values_that_mean_nothing_are_named(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"generation_config.json: {[*config][-1]}"):
        read_generation_defaults(written(tmp_path, config)).for_requests("auto", "here")


@pytest.mark.parametrize("ends", ["2", [2, "3"], [[2]], {"a": 1}, True], ids=str)
def test_end_ids_that_are_none_are_refused(tmp_path: Path, ends: Any) -> None:
    with pytest.raises(ConfigError, match="eos_token_id .* is neither an id nor a list of ids"):
        read_generation_defaults(written(tmp_path, {"eos_token_id": ends}))


@pytest.mark.parametrize("text", ["{", "[]", '{"a": ' * 5000])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="generation_config.json"):
        read_generation_defaults(tmp_path)


def test_a_folder_without_files_says_nothing(tmp_path: Path) -> None:
    assert read_generation_defaults(tmp_path) == GenerationDefaults()
