"""Every rule between settings. All are looked at together, so that a launcher is mended once and not five times.

Nothing here needs torch or a process group. A rule's message gives the numbers and the nearest values that would do.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config.rules import (
    adapters,
    attention,
    checkpoint,
    context,
    cuda_graphs,
    data,
    experts,
    hybrid,
    layout,
    network,
    no_effect,
    optimizer,
    overlap,
    precision,
    run,
    vision,
)
from megatron.core.config.rules.rule import ConfigRuleInput, Rule
from megatron.core.config.settings.run import RunConfig

_NETWORK_FILES = (no_effect, run, layout, network, attention, experts, hybrid, precision, context)
_OTHER_FILES = (optimizer, overlap, cuda_graphs, data, checkpoint, adapters, vision)
NEEDS = run.NEEDS
_OTHERS = [
    value
    for file in _NETWORK_FILES + _OTHER_FILES
    for value in vars(file).values()
    if isinstance(value, Rule) and value not in run.NEEDS
]
RULES = tuple(rule for rule in _OTHERS if rule.needs_sizes)
ALWAYS = tuple(rule for rule in _OTHERS if not rule.needs_sizes)


def broken_rules(config: RunConfig, world_size: int) -> Iterator[tuple[str, str]]:
    """Yield (name of the rule, message) of every rule that a resolved config breaks.

    If required or positive sizes are missing, rules that need them are not checked.
    """
    setting = ConfigRuleInput(config, world_size)
    lacking = [(rule.name, message) for rule in NEEDS if (message := rule.problem_message(setting))]
    yield from lacking
    for rule in ALWAYS + (() if lacking else RULES):
        message = rule.problem_message(setting)
        if message:
            yield rule.name, message
