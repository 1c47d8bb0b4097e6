"""From the pickled arguments of a Megatron run to our settings, by field name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.config.flags import flag_fields
from megatron.core.config.model import ModelConfig, RopeConfig
from megatron.core.dist_checkpointing.store import CheckpointError

# Names that were changed since. The new one wins where both are there.
_RENAMED = {"layernorm_epsilon": "norm_epsilon", "position_embedding_type": "position_embedding_type"}
_NEEDED = ("num_layers", "hidden_size", "num_attention_heads")
_WORDS, _PLACES = "embedding.word_embeddings.weight", "embedding.position_embeddings.weight"
_PUBLISHED_HEAD_SIZE = 64  # of GPT-345M and BERT-345M, the published files without arguments


def settings_of(arguments: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The model that the arguments describe. given: settings that the reader knows better; they win.

    Arguments that are not of the model (layout, schedule, paths) are left out.
    """
    known = {field.name for config in (ModelConfig, RopeConfig) for field, _ in flag_fields(config)}
    found = {_RENAMED.get(name, name): value for name, value in arguments.items() if name in _RENAMED}
    found |= {name: value for name, value in arguments.items()
              if name in known and (value is None or isinstance(value, (bool, int, float, str)))}
    if arguments.get("use_rotary_position_embeddings"):
        found["position_embedding_type"] = "rope"
    if arguments.get("tokenizer_type") == "NullTokenizer" and arguments.get("vocab_size"):
        # What came with the argument for its end of document has no id beyond --vocab-size.
        found["null_tokenizer_ids"] = arguments["vocab_size"] + ("null_tokenizer_eod_id" not in arguments)
    if arguments.get("encoder_num_layers") and not found.get("num_layers"):
        found["num_layers"] = arguments["encoder_num_layers"]
    # The padding of that run's layout is not part of the model.
    return {**{name: value for name, value in found.items() if name != "padded_vocab_size" and value is not None}, **given}


def completed(settings: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], *, where: str) -> dict[str, Any]:
    """Settings of a file as its tensors complete them, and without arguments the head size of the published ones.

    shapes: of the parameters (our names); of one that ranks share, of one rank's. Raises `CheckpointError` when the settings
    contradict the tensors, or when the number of heads cannot be known.
    """
    shown, hidden_size = _shown(shapes), shapes[_WORDS][1]
    wrong = [f"{name}: {settings[name]} in the settings, {value} in the tensors" for name, value in shown.items()
             if name != "bert_binary_head" and settings.get(name, value) != value]
    if wrong:
        raise CheckpointError(f"{where} contradicts itself", wrong)
    halves = () if shown["architecture"] == "t5" else ("encoder_num_layers", "decoder_num_layers")
    whole = {**{name: value for name, value in settings.items() if name not in halves}, **shown}
    if "num_attention_heads" not in whole:
        if hidden_size != 16 * _PUBLISHED_HEAD_SIZE:
            raise CheckpointError(f"{where} does not say how many attention heads the model has, and its tensors cannot show "
                                  "it; give --num-attention-heads")
        whole["num_attention_heads"] = hidden_size // _PUBLISHED_HEAD_SIZE
    return whole


def _shown(shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """What parameters tell of their network."""
    depths = {stack: len({found[1] for name in shapes for found in [re.match(rf"{stack}\.layers\.(\d+)\.", name)] if found})
              for stack in ("encoder", "decoder")}
    kind = "t5" if all(depths.values()) else "bert" if depths["encoder"] else "gpt"
    found: dict[str, Any] = {"architecture": kind, "num_layers": depths["encoder"] or depths["decoder"],
                             "hidden_size": shapes[_WORDS][1]}
    if kind == "t5":
        found |= {"encoder_num_layers": depths["encoder"], "decoder_num_layers": depths["decoder"]}
    if kind == "bert":
        found["bert_binary_head"] = any(name.startswith(("pooler.", "binary_head.")) for name in shapes)
    if _PLACES in shapes:
        found["max_position_embeddings"] = shapes[_PLACES][0]
    return found
