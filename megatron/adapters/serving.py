"""Adapters (LoRA, rsLoRA, DoRA) of several requests beside one base, in one pass.

    x [t, in] -> A of all adapters in the pass, one under the other -> [t, sum of ranks]; zero where a token has another adapter -> B -> + W x

Two matmuls a layer, whatever the number of adapters, their ranks and their targets; none where no request of a pass has an adapter.
Factors are cut over tensor ranks as those of a run are. Number 0 is the base; others are given to adapters as they are loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.adapters.files import InMemoryAdapterSource, LoadedAdapter
from megatron.core.config.adapters import layer_adapter_plans
from megatron.core.config.plan.layers import LayerPlan, network_layer_plans
from megatron.core.config.plan.linear_layers import layer_module_path, linear_shapes_of_layer
from megatron.core.config.settings.model import ModelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel import device as devices
from megatron.core.parallel.spec import local_shape, local_shard_boxes, param_spec_of
from megatron.core.tensor_parallel.frozen_quantized import dense_weight
from megatron.core.tensor_parallel.linear import AdaptableLinear
from megatron.core.transformer.adapters import AdapterBuildContext, LinearAdapter
from megatron.core.transformer.context.layer_build_context import LayerBuildContext


@dataclass(frozen=True, slots=True)
class _LoraFactors:
    """Factors of one adapter in one layer, this rank's shards. first: A of all parts, [r, in]; second: scale * B, [out,
    r], zero outside of a part's rows; lengths: DoRA's row factors, [out], or None.
    """

    first: Tensor
    second: Tensor
    lengths: Tensor | None


class MultiAdapterLinear(nn.Module):
    """Replaces a linear layer's adapter: applies to each token the adapter of its request."""

    def __init__(self, bank: AdapterBank, linear: AdaptableLinear) -> None:
        super().__init__()
        self.bank, self.factors = bank, dict[int, _LoraFactors]()
        shards = param_spec_of(linear.weight).shards
        self._dim = shards[0].dim if shards else None
        self._last: tuple[tuple[int, ...], Tensor, Tensor, Tensor | None] | None = None

    @property
    def enabled(self) -> bool:
        """Whether an adapter of the current pass is on this layer."""
        return any(number in self.factors for number in self.bank.active)

    @property
    def has_dora_magnitudes(self) -> bool:
        """Whether one of the current pass's adapters scales rows (DoRA), which also scales the layer's own product."""
        return any(self.factors[number].lengths is not None for number in self.bank.active if number in self.factors)

    def set_adapter(self, number: int, factors: _LoraFactors | None) -> None:
        """Add an adapter's factors under its number, or with None remove them."""
        self._last = None
        self.factors.pop(number, None)
        if factors is not None:
            self.factors[number] = factors

    def forward(self, x: Tensor, base: Tensor, weight: Tensor) -> Tensor:
        """Return the adapted output. x: the input [t, 1, in]; base: the layer's output, for DoRA without bias."""
        numbers, first, second, lengths = self._joined_factors()
        region = self.bank.build.tp_region
        low = F.linear(x, first)
        if self._dim == 0:
            low = region.copy_to_region(low)
        elif self._dim == 1:
            low = region.reduce_from_region(low)
        ranks = tuple((number, self.factors[number].first.shape[0]) for number in numbers)
        result = base + F.linear(low.masked_fill(self.bank.other_adapters_mask(ranks, low), 0.0), second)
        if lengths is None:
            return result
        return result * lengths.index_select(0, self.bank.adapter_slots(numbers, result))[:, None]

    def merged_weight(self, weight: Tensor) -> Tensor:
        """Return the weight (any shape) as it is: layers whose weight is multiplied directly are refused."""
        return weight

    def _joined_factors(self) -> tuple[tuple[int, ...], Tensor, Tensor, Tensor | None]:
        """Return (adapter numbers, A [sum of ranks, in], B [out, sum of ranks], row factors [1 + adapters, out] or
        None) of the pass's adapters.
        """
        numbers = tuple(number for number in self.bank.active if number in self.factors)
        if self._last is None or self._last[0] != numbers:
            chosen = [self.factors[number] for number in numbers]
            # B column by column: a few rows, as in decoding, pass through it twice as fast on CPUs.
            first, second = torch.cat([one.first for one in chosen]), torch.cat([one.second.t() for one in chosen]).t()
            ones = torch.ones_like(second[:, 0])
            lengths = [ones, *(ones if one.lengths is None else one.lengths for one in chosen)]
            self._last = numbers, first, second, torch.stack(lengths) if self.has_dora_magnitudes else None
        return self._last


class AdapterBank:
    """The adapters on the linear layers of this rank's stages, and which tokens of the current pass use which.
    active: numbers of the adapters in this pass, ascending.
    """

    def __init__(self, stages: Sequence[GPTModel]) -> None:
        self.build: LayerBuildContext = stages[0].build
        self.active: tuple[int, ...] = ()
        self._of_token: Tensor | None = None
        self._masks: dict[tuple[tuple[int, int], ...], Tensor] = {}
        self._places: dict[tuple[int, ...], Tensor] = {}
        self._layers = [(int(index), layer) for stage in stages for index, layer in stage.decoder.layers.items()]

    def select_adapters(self, of_token: Tensor | None, numbers: Sequence[int] = ()) -> None:
        """Set the adapters of the next pass. of_token: the adapter number of each token, int64 [t], 0 for the base;
        None: all of the base. numbers: that occur in it.
        """
        self.active, self._of_token = tuple(sorted({*numbers} - {0})), of_token
        self._masks, self._places = {}, {}

    def other_adapters_mask(self, ranks: tuple[tuple[int, int], ...], low: Tensor) -> Tensor:
        """Return where a token does not use the adapter of a column, given as (number, rank) pairs, [t or t/tp, 1, ranks].

        What another's adapter makes of a token may be infinite, so that it is left out and not multiplied by zero.
        """
        if ranks not in self._masks:
            owners = [number for number, rank in ranks for _ in range(rank)]
            other = self._adapter_of_tokens[:, None] != _upload_adapter_numbers(owners, low.device)
            self._masks[ranks] = other[:, None]
        mask = self._masks[ranks]
        return mask if len(mask) == len(low) else self.build.tp_region.scatter_to_sequence(mask)

    def adapter_slots(self, numbers: tuple[int, ...], result: Tensor) -> Tensor:
        """Return for each token 1 + the index of its adapter among these numbers, or 0 for none, int64 [t or t/tp]."""
        if numbers not in self._places:
            known = _upload_adapter_numbers(numbers, result.device)
            same = self._adapter_of_tokens[:, None] == known
            self._places[numbers] = (same * torch.arange(1, len(numbers) + 1, device=result.device)).sum(1)
        places = self._places[numbers]
        return places if len(places) == len(result) else self.build.tp_region.scatter_to_sequence(places)

    @property
    def _adapter_of_tokens(self) -> Tensor:
        """Return the adapter number of each token of the pass, int64 [t]."""
        assert self._of_token is not None, "a pass with adapters says whose tokens are whose"
        return self._of_token

    @property
    def other_engine_has_adapters(self) -> bool:
        """Whether another engine over the same stages has adapters on them."""
        return any(one.bank is not self and one.factors for one in self._multi_adapter_layers())

    def _multi_adapter_layers(self) -> Iterator[MultiAdapterLinear]:
        """Yield the layers that have adapters of requests."""
        for _, layer in self._layers:
            for module in layer.modules():
                if isinstance(module, MultiAdapterLinear):
                    yield module

    @torch.no_grad()
    def set_adapter(self, number: int, adapters: LoadedAdapter | None) -> None:
        """Add adapters under a number, or with None remove them. Collective over the ranks that hold the network."""
        model = self.build.model if adapters is None else replace(self.build.model, adapter=adapters.model.adapter)
        plans = {plan.index: plan for plan in network_layer_plans(model)}
        for served in self._multi_adapter_layers():
            served.set_adapter(number, None)
        for index, layer in self._layers:
            if adapters is not None:
                self._set_layer_adapter(number, layer, plans[index], InMemoryAdapterSource(adapters), model)

    def _set_layer_adapter(
        self, number: int, layer: nn.Module, plan: LayerPlan, source: InMemoryAdapterSource, model: ModelConfig
    ) -> None:
        """Load the factors of one transformer layer's adapters and set them on its linear layers."""
        made = AdapterBuildContext(self.build.mesh, self.build.streams, self.build.dtype, 0.0, model.adapter.dora)
        shapes = linear_shapes_of_layer(model, plan)
        for path, group in groupby(layer_adapter_plans(model, plan), key=lambda one: one.linear):
            linear = layer.get_submodule(path)
            assert isinstance(linear, AdaptableLinear), "adapters of experts are refused"
            names = [name for name, _ in shapes[path].parts]
            adapter = LinearAdapter(tuple(group), names, linear.weight, self.build.tp_region, made)
            _load_adapter_parameters(
                adapter, f"model.{layer_module_path(model, plan)}.{path}.adapter", source, self.build
            )
            if not (isinstance(linear.adapter, MultiAdapterLinear) and linear.adapter.bank is self):
                linear.adapter = MultiAdapterLinear(self, linear)  # type: ignore[assignment]
            served: MultiAdapterLinear = linear.adapter  # type: ignore[assignment]
            served.set_adapter(number, _concatenated_lora_factors(adapter, dense_weight(linear.weight)))


def _load_adapter_parameters(
    adapter: LinearAdapter, prefix: str, source: InMemoryAdapterSource, build: LayerBuildContext
) -> None:
    """Fill an adapter's parameters with this rank's shards from a source."""
    for name, param in list(adapter.named_parameters()):
        spec = param_spec_of(param)
        value = torch.zeros(local_shape(spec, build.mesh), dtype=build.dtype, device=build.mesh.device)
        for piece in local_shard_boxes(spec, build.mesh):
            value[piece.local.slices()] = source.read(f"{prefix}.{name}", piece.box).to(value)
        filled = nn.Parameter(value, requires_grad=False)
        filled.spec = spec  # type: ignore[attr-defined]
        owner, _, last = name.rpartition(".")
        setattr(adapter.get_submodule(owner), last, filled)


def _concatenated_lora_factors(adapter: LinearAdapter, weight: Tensor) -> _LoraFactors:
    """Return the factors of all parts of a layer as one pair, with DoRA's row factors."""
    pairs = adapter.named_lora_factors
    first = torch.cat([pair.lora_A for _, pair in pairs])
    second = torch.cat(
        [adapter.join_part_rows({name: pair.scale * pair.lora_B}, weight[:, : pair.rank]) for name, pair in pairs], 1
    )
    return _LoraFactors(first.detach(), second.detach(), adapter.dora_row_factors(weight))


def _upload_adapter_numbers(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Copy adapter numbers to the device, int64 [n], without waiting for it."""
    return devices.copy_arrays_to_device([np.array(numbers, np.int64)], device)[0]
