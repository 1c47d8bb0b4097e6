"""Published networks say here, decoded together, what transformers' own `generate` says of each prompt alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.config.settings.inference import InferenceConfig
from megatron.core.tokenizers.build import NullTokenizer
from megatron.inference.beam import beam_search
from megatron.inference.engine import Engine
from megatron.inference.requests import Ids
from megatron.training.checkpoint.inference_model import GPT, load_network
from tests.unit.inference.serving import engine_of, greedy, prompts

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

WORDS, LENGTH, NEW = 50, 64, 24
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
SPARSE = {**SIZES, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
LATENT = {
    **SIZES,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2",
        {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3},
    ),
    "llama": ("Llama", SIZES),
    "mistral": ("Mistral", {**SIZES, "sliding_window": 9}),
    "qwen2": ("Qwen2", SIZES),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 8}),
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 4}),
    "qwen3 with experts": ("Qwen3Moe", {**SPARSE, "head_dim": 8}),
    "deepseek v2": ("DeepseekV2", {**LATENT, "topk_method": "greedy", "n_group": 1, "topk_group": 1}),
    "gpt-oss": (
        "GptOss",
        {
            **SIZES,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


def published(kind: str, folder: Path) -> Any:
    """transformers' model, which also lies in the folder."""
    name, sizes = KINDS[kind]
    torch.manual_seed(5)
    config = getattr(transformers, f"{name}Config")(
        **sizes, bos_token_id=0, eos_token_id=WORDS - 1, pad_token_id=WORDS - 1
    )
    config.torch_dtype = torch.float32
    causal = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    model = getattr(transformers, causal)._from_config(config, attn_implementation="eager").float().eval()
    model.save_pretrained(folder)
    return model


def said(model: Any, prompt: Ids, **how: Any) -> list[Any]:
    """What transformers says of one prompt."""
    with torch.no_grad():
        return model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            **how,
        )


def loaded(folder: Path) -> Any:
    """The same in our stages, on the CPU."""
    tokenizer = {"tokenizer_type": "NullTokenizer", "vocab_size": WORDS}
    return load_network(str(folder), GPT, tokenizer=tokenizer, device=torch.device("cpu"))


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_those_of_the_published_programme_token_for_token(tmp_path: Path, kind: str) -> None:
    model = published(kind, tmp_path)
    engine = engine_of(loaded(tmp_path).stages[0], NullTokenizer(WORDS), block=4, tokens=24, together=5)
    texts = prompts(7, longest=30)
    replies = engine.run([greedy(text, NEW, ignore_eod=False, logprobs=True) for text in texts])
    for text, reply in zip(texts, replies, strict=True):
        answer = said(model, text)
        ids = answer.sequences[0, len(text) :].tolist()
        ends = ids[-1] == WORDS - 1
        assert list(reply.ids) == (ids[:-1] if ends else ids) and (reply.reason == "stop") == ends
        expected = [
            float(scores[0].log_softmax(-1)[token]) for scores, token in zip(answer.scores, reply.ids, strict=False)
        ]
        assert [token.logprob for token in reply.tokens] == pytest.approx(expected, abs=2e-4)
    assert len({token for reply in replies for token in reply.ids}) > 8, "texts of few words prove little"


@pytest.mark.parametrize("width, penalty", [(3, 1.0), (4, 0.5), (2, 2.0)])
def test_a_beam_finds_what_the_published_search_finds(tmp_path: Path, width: int, penalty: float) -> None:
    model = published("llama", tmp_path)
    engine = engine_of(loaded(tmp_path).stages[0], NullTokenizer(WORDS), block=4)
    for text in prompts(4, longest=20):
        answer = said(
            model, text, num_beams=width, num_return_sequences=width, length_penalty=penalty, early_stopping=False
        )
        beams = beam_search(engine.run, text, width=width, num_tokens=NEW, ends=(WORDS - 1,), length_penalty=penalty)
        theirs = [[token for token in row if token != WORDS - 1] for row in answer.sequences[:, len(text) :].tolist()]
        assert [list(beam.ids) for beam in beams] == theirs
        assert [beam.score for beam in beams] == pytest.approx(answer.sequences_scores.tolist(), abs=1e-4)


PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village,",
    "Water boils at",
    "1, 2, 3, 5, 8,",
)


@pytest.mark.skipif("SMOLLM2" not in os.environ, reason="SMOLLM2 names no folder with the weights of a SmolLM2")
@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_a_real_network_says_what_it_says_in_the_published_programme(dtype: str) -> None:
    folder, count = os.environ["SMOLLM2"], 48
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto" if dtype == "auto" else torch.float32
    ).eval()
    ours = load_network(folder, GPT, device=torch.device("cpu"), dtype=dtype)
    texts = [tuple(ours.tokenizer.tokenize(prompt)) for prompt in PROMPTS]
    # Half formats round differently in a batch: two tokens may be as likely as each other.
    engine = Engine(
        ours.stages,
        ours.tokenizer,
        InferenceConfig(inference_max_requests=5 if dtype == "float32" else 1, inference_max_seq_length=128),
    )
    for text, reply in zip(
        texts, engine.run([greedy(text, count, logprobs=True, top_logprobs=2) for text in texts]), strict=True
    ):
        with torch.no_grad():
            whole = model.generate(
                torch.tensor([text]),
                attention_mask=torch.ones(1, len(text), dtype=torch.int64),
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )[0, len(text) :].tolist()
        differs = next((place for place in range(count) if reply.ids[place] != whole[place]), None)
        if differs is not None:
            (_, best), (_, second) = reply.tokens[differs].top
            assert dtype == "auto" and best - second < 0.05, (
                f"{ours.tokenizer.detokenize(reply.ids)!r} differs at token {differs}"
            )
