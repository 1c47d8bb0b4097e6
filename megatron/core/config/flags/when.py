"""When a setting has an effect: conditions on other settings, and on facts that follow from several of them.

    rope_scaling_factor: float = flag(8.0, "...", used_with=(ROTATES, When("use_rope_scaling", idle="noted")))

says that the flag does nothing without rotations and --use-rope-scaling, and that a run to which it is given starts and says
so. All conditions must hold. A config class says it of all its flags at once with `USED_WITH`. What a run is told is worked out
from this (`idle.py`): the rule that refuses, the notes at its start, and which settings are no part of a network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

# What becomes of a run that is given a setting without effect:
#   refused    it does not start: what it was given for would not happen
#   noted      it starts and says so, as scripts of Megatron-LM give such flags all the same
#   accepted   nothing is said: the network's function does not depend on it, but other things do (a length that is published)
Idle = Literal["refused", "noted", "accepted"]


@dataclass(frozen=True, slots=True)
class Fact:
    """What follows from several settings. ways: its value -> what makes it so; verb: what one does with that."""

    ways: Mapping[object, str]
    verb: str = "give"


FACTS: Mapping[str, Fact] = MappingProxyType(
    {
        "architecture": Fact(
            {
                "gpt": "pretrain_gpt.py",
                "bert": "pretrain_bert.py",
                "t5": "pretrain_t5.py",
                "vit": "the image classifier",
            },
            "start",
        ),
        "attends": Fact({True: "layers with attention"}),
        "has_mamba_layers": Fact({True: "M in --hybrid-layer-pattern"}),
        "has_delta_net_layers": Fact({True: "--experimental-attention-variant"}),
        "mlps": Fact({"dense": "layers without experts", "moe": "--num-experts"}),
        "keeps_state": Fact({True: "--hybrid-layer-pattern or --experimental-attention-variant"}),
        "uses_rotary": Fact({True: "--position-embedding-type rope"}),
        "uses_yarn": Fact({True: "--rope-type yarn", False: "--rope-type rope"}),
        "has_gated_mlp": Fact({True: "--swiglu, --geglu or --quick-geglu"}),
        "predicts_far": Fact({True: "--mtp-num-layers 2 or more"}),
        "images_in_text": Fact({True: "--vision-model-type to pretrain_vlm.py"}),
        "reads_images": Fact({True: "--vision-model-type"}),
        "reward_head": Fact({False: "another --finetune-task than reward"}),
        "low_precision_recipe": Fact({True: "--fp8-format or --fp4-format", "delayed": "--fp8-recipe delayed"}),
        "update_rules": Fact(
            {"muon": "--optimizer muon", "lion": "--optimizer lion", "adafactor": "--optimizer adafactor"}
        ),
        "offloads_activations": Fact({True: "--fine-grained-activation-offloading or --cpu-offloading-num-layers"}),
    }
)


@dataclass(frozen=True, slots=True)
class When:
    """A condition on a setting or a fact: it has one of `values`, or any that is true if none are named; of several values
    (a tuple or a set) one is enough. idle: what becomes of a run that is given a flag while this does not hold. instead: what
    to do for the same purpose, where it is not to make this hold.
    """

    setting: str
    values: tuple[object, ...] = ()
    idle: Idle = "refused"
    instead: str = ""

    def holds(self, value_of: Callable[[str], Any]) -> bool:
        """Whether the condition holds. value_of: name of a setting or fact -> its value."""
        value = value_of(self.setting)
        if not self.values:
            return bool(value)
        return any(one in self.values for one in (value if isinstance(value, (tuple, frozenset)) else (value,)))

    def advice(self) -> str:
        """Return what to give or to leave out so that it holds, such as "give --position-embedding-type rope"."""
        if self.instead:
            return self.instead
        if (fact := FACTS.get(self.setting)) is not None:
            return f"{fact.verb} {_either([fact.ways[value] for value in self.values or (True,)])}"
        flag = f"--{self.setting.replace('_', '-')}"
        if self.values and not any(self.values):
            return f"leave out {flag}"
        return f"give {flag} {_either(map(str, self.values))}" if self.values else f"give {flag}"


def _either(words: Iterable[str]) -> str:
    """Return words as a choice: "a", "a or b", "a, b or c"."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last
