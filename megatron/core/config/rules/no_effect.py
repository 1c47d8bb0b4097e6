"""The rule that a setting without effect is not given; the flags themselves declare when they have one (`used_with`)."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config.flags.idle import idle_settings
from megatron.core.config.plan.network import value_of_run
from megatron.core.config.rules.rule import ConfigRuleInput, config_rule


@config_rule("no-effect")
def _idle_setting_problems(s: ConfigRuleInput) -> Iterator[str]:
    """A setting is given only together with those without which it has no effect."""
    yield from map(str, idle_settings(s.run, value_of_run(s.run), refused_only=True))
