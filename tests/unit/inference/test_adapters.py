"""Adapters of several requests in one batch: each gets what the network with its adapter merged gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.adapters.files import LinearLoraWeights, LoadedAdapter
from megatron.core.config.adapters import layer_adapter_plans
from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.plan.layers import network_layer_plans
from megatron.core.config.plan.linear_layers import layer_module_path, linear_shapes_of_layer
from megatron.core.config.settings.adapter import AdapterConfig
from megatron.core.config.settings.inference import InferenceConfig
from megatron.core.config.settings.model import ModelConfig
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.models.gpt import GPTModel
from megatron.core.tokenizers.build import NullTokenizer
from megatron.inference.engine import Engine
from megatron.inference.requests import GenerationEvent, GenerationReply, GenerationRequest
from tests.helpers import tiny
from tests.helpers.world import Worlds
from tests.unit.inference.serving import EXPERTS, KINDS, LATENT, engine_of, greedy, prompts, slowly, stages_on

LLAMA: dict[str, Any] = {**KINDS["one group"], "init_method_std": 0.3}
ADAPTERS: dict[str, AdapterConfig] = {
    "all": AdapterConfig(lora_rank=3, lora_alpha=6.0),
    "some": AdapterConfig(
        lora_rank=5, lora_rslora=True, lora_targets=("v_proj", "*.layers.1.mlp.linear_fc2", "q_proj=2:9")
    ),
    "dora": AdapterConfig(lora_rank=2, dora=True, lora_targets=("q_proj", "linear_proj", "gate_proj", "linear_fc2")),
}
NAMES = ("", *ADAPTERS)


def adapter_of(model: ModelConfig, config: AdapterConfig, seed: int = 3) -> LoadedAdapter:
    """Random factors, and lengths of rows that are not the base's."""
    adapted, pairs = replace(model, adapter=config), []
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return 0.2 * torch.randn(shape, generator=generator, dtype=torch.float64)

    for plan in network_layer_plans(adapted):
        shapes = linear_shapes_of_layer(adapted, plan)
        for one in layer_adapter_plans(adapted, plan):
            rows = shapes[one.linear].row_offset_and_count_of_part(one.part)
            first, second = normal(one.rank, shapes[one.linear].inputs), normal(rows[1], one.rank)
            lengths = 2 + normal(rows[1]) if config.dora else None
            linear = f"{layer_module_path(adapted, plan)}.{one.linear}"
            pairs.append(LinearLoraWeights(linear, one.part, rows, first, second, one.scale, lengths))
    return LoadedAdapter("made", adapted, tuple(pairs), {}, {})


def merged(name: str, **changes: Any) -> GPTModel:
    """The network with an adapter in its weights, by the papers' formulas."""
    (model,) = stages_on(1, **changes)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for pair in adapter_of(model.build.model, ADAPTERS[name]).pairs if name else ():
            rows = weights[f"{pair.linear}.weight"].narrow(0, *pair.rows)
            rows += (pair.scale * pair.second @ pair.first).to(rows)
            if pair.lengths is not None:
                rows *= (pair.lengths / rows.double().norm(dim=1))[:, None].to(rows)
    return model


def with_adapters(engine: Engine) -> Engine:
    for name, config in ADAPTERS.items():
        engine.adapters.load(name, adapter_of(engine.model, config))
    return engine


@pytest.mark.parametrize("kind, tolerance", [({"fp64": True}, 1e-10), ({"fp64": False}, 1e-5)], ids=["fp64", "fp32"])
def test_each_request_of_a_mixed_batch_gets_its_merged_network(kind: dict[str, Any], tolerance: float) -> None:
    flags = {**LLAMA, **kind, "add_bias_linear": True}
    engine = with_adapters(engine_of(stages_on(1, **flags)[0], block=3, tokens=9, together=5))
    texts = prompts(8, longest=14)
    asked = [greedy(text, 8, logprobs=True, adapter=NAMES[place % 4]) for place, text in enumerate(texts)]
    answers = set()
    for request, reply in zip(asked, engine.run(asked), strict=True):
        ids, logprobs = slowly(merged(request.adapter, **flags), request.prompt, 8)
        assert list(reply.ids) == ids
        assert [token.logprob for token in reply.tokens] == pytest.approx(logprobs, abs=tolerance)
        answers.add((request.adapter, reply.ids))
    base = {reply.ids for reply in engine.run([replace(one, adapter="") for one in asked])}
    assert len(answers) == 8 and len(base - {ids for _, ids in answers}) >= 4, "the adapters do nothing"


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "tp2": {"tensor_model_parallel_size": 2, **LATENT},
    "pp2": {"pipeline_model_parallel_size": 2},
    "dp2": {},
}


def answered(changes: dict[str, Any]) -> list[GenerationReply] | None:
    """The replies, on the first rank."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    config = InferenceConfig(inference_dynamic_batching_max_tokens=16, inference_max_requests=4)
    engine = Engine(stages_on(size, **changes), NullTokenizer(tiny.VOCABULARY), config)
    if not engine.mesh.world.is_first:
        engine.run_as_follower()
        return None
    for name, adapter in ADAPTERS.items():
        targets = ("*.linear_q_proj", "*.linear_kv_down_proj", "*.linear_proj", "linear_fc1", "linear_fc2")
        config_here = replace(adapter, lora_targets=targets) if "kv_lora_rank" in changes else adapter
        engine.adapters.load(name, adapter_of(engine.model, config_here))
    engine.adapters.unload("some")
    engine.adapters.load("some", adapter_of(engine.model, AdapterConfig(lora_rank=2, lora_targets=("linear_fc1",))))
    texts = prompts(8, longest=12)
    asked = [greedy(text, 6, logprobs=True, adapter=NAMES[place % 4]) for place, text in enumerate(texts)]
    replies = engine.run(asked)
    engine.close()
    return replies


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mixed_batch_is_the_same_under_every_layout(layout: str, world: Worlds) -> None:
    changes = {**KINDS["grouped"], "swiglu": True, "init_method_std": 0.3, **LAYOUTS[layout]}
    alone = {name: value for name, value in changes.items() if "parallel" not in name}
    expected, found = answered(alone), world(2).run(answered, changes)[0]
    assert expected is not None and found is not None
    for one, other in zip(found, expected, strict=True):
        assert one.ids == other.ids
        assert [token.logprob for token in one.tokens] == pytest.approx(
            [token.logprob for token in other.tokens], abs=1e-9
        )


def test_a_beginning_is_shared_among_requests_of_one_adapter_only() -> None:
    engine = with_adapters(engine_of(stages_on(1, **LLAMA)[0], block=2))
    text = tuple(range(1, 12))
    for name in NAMES:
        first, second = (engine.run([greedy(text, 4, adapter=name)])[0] for _ in range(2))
        assert (first.cached_tokens, second.cached_tokens) == (0, 10) and first.ids == second.ids
    engine.adapters.unload("all")
    engine.adapters.load("all", adapter_of(engine.model, ADAPTERS["all"], seed=5))
    assert engine.run([greedy(text, 4, adapter="all")])[0].cached_tokens == 0


@pytest.mark.parametrize("guesser", ["draft", "ahead"])
def test_speculative_decoding_gives_the_same_tokens(guesser: str) -> None:
    flags = {**LLAMA, **(KINDS["ahead"] if guesser == "ahead" else {})}
    draft = stages_on(1, seed=8, **LLAMA)[0] if guesser == "draft" else None
    asked = [greedy(text, 9, adapter=NAMES[place % 4]) for place, text in enumerate(prompts(5, longest=9))]
    found, expected = (
        with_adapters(engine_of(stages_on(1, **flags)[0], **settings)).run(asked)
        for settings in ({"draft": draft, "guesses": 2}, {})
    )
    assert [reply.ids for reply in found] == [reply.ids for reply in expected]


def test_an_adapter_goes_when_its_last_request_ends() -> None:
    engine = with_adapters(engine_of(stages_on(1, **LLAMA)[0], max_loras=3))
    text, events = prompts(1)[0], list[GenerationEvent]()
    (expected,) = engine.run([greedy(text, 6, adapter="all")])
    engine.submit(greedy(text, 6, adapter="all"), events.append)
    engine.step()
    engine.adapters.unload("all")
    with pytest.raises(ConfigError, match="no adapter 'all'"):
        engine.submit(greedy(text, 6, adapter="all"), events.append)
    with pytest.raises(CheckpointError, match="--max-loras is 3"):
        engine.adapters.load("all", adapter_of(engine.model, ADAPTERS["all"]))
    while not engine.is_idle:
        engine.step()
    assert events[-1].reply is not None and events[-1].reply.ids == expected.ids
    engine.step()
    engine.adapters.load("all", adapter_of(engine.model, ADAPTERS["all"]))
    assert engine.adapters.names == ("some", "dora", "all")


@pytest.mark.parametrize(
    "flags, config, words",
    [
        (LLAMA, {"lora_rank": 20}, "above --max-lora-rank 16"),
        ({**LLAMA, **EXPERTS}, {"lora_rank": 2}, "adapts experts"),
        (LATENT, {"lora_rank": 2}, "latents to keys and values"),
    ],
)
def test_an_adapter_that_cannot_be_served_is_refused(flags: dict[str, Any], config: Any, words: str) -> None:
    engine = engine_of(stages_on(1, **flags)[0], max_lora_rank=16)
    with pytest.raises(CheckpointError) as error:
        engine.adapters.load("bad", adapter_of(engine.model, AdapterConfig(**config)))
    assert words in str(error.value) and not engine.adapters.names
    whole = replace(adapter_of(engine.model, AdapterConfig(lora_rank=1)), saved={"output_layer.weight": torch.zeros(1)})
    with pytest.raises(CheckpointError, match="all requests share"):
        engine.adapters.load("bad", whole)


def test_what_an_adapter_makes_infinite_is_no_other_requests_concern() -> None:
    flags = {**LLAMA, "fp64": False}
    engine = with_adapters(engine_of(stages_on(1, **flags)[0], together=5))
    wild = adapter_of(engine.model, ADAPTERS["all"])
    pairs = tuple(replace(pair, first=pair.first * 1e38, second=pair.second * 1e30) for pair in wild.pairs)
    engine.adapters.load("wild", replace(wild, pairs=pairs))
    asked = [
        greedy(text, 6, logprobs=True, adapter=NAMES[place % 4]) for place, text in enumerate(prompts(8, longest=9))
    ]
    expected = engine.run(asked)
    mixed = engine.run([*asked[:4], replace(asked[0], adapter="wild"), *asked[4:]])
    assert mixed.pop(4).reason == "error"
    for one, other in zip(mixed, expected, strict=True):
        assert one.ids == other.ids
        assert [token.logprob for token in one.tokens] == pytest.approx(
            [token.logprob for token in other.tokens], abs=1e-5
        )


@pytest.mark.parametrize(
    "what", ["no magnitudes", "short magnitudes", "too many factors", "no factors", "infinite in fp32"]
)
def test_adapters_that_are_not_complete_are_refused_before_any_rank_has_them(what: str) -> None:
    engine = with_adapters(engine_of(stages_on(1, **{**LLAMA, "fp64": False})[0], together=5))
    made = adapter_of(engine.model, ADAPTERS["dora"])
    first, *others = made.pairs
    assert first.lengths is not None
    pairs = {
        "no magnitudes": (replace(first, lengths=None), *others),
        "short magnitudes": (replace(first, lengths=first.lengths[:-1]), *others),
        "too many factors": (*made.pairs, replace(first, linear=first.linear.replace("0", "1"), part="v")),
        "no factors": tuple(others),
        "infinite in fp32": (replace(first, second=first.second * 1e300), *others),
    }[what]
    with pytest.raises(CheckpointError, match="cannot be served"):
        engine.adapters.load("bad", replace(made, pairs=pairs))
    assert engine.adapters.names == tuple(ADAPTERS)
    assert engine.run([greedy(prompts(1)[0], 3, adapter="dora")])[0].reason == "length"


def test_an_adapter_of_another_network_is_refused() -> None:
    engine = engine_of(stages_on(1, **LLAMA)[0])
    other = stages_on(1, **{**LLAMA, "hidden_size": 16, "kv_channels": 8})[0].build.model
    with pytest.raises(CheckpointError, match="of a matrix of"):
        engine.adapters.load("bad", adapter_of(other, ADAPTERS["all"]))
    with pytest.raises(CheckpointError, match="no such linear layer"):
        engine.adapters.load("bad", adapter_of(replace(engine.model, num_layers=3), ADAPTERS["all"]))
    assert GenerationRequest((1,), 1, adapter="x").adapter == "x"
