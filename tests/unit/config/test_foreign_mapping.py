"""Every key of another program's mapping is taken, known to change nothing, off, or refused by name."""

from __future__ import annotations

import pytest

from megatron.core.config.foreign.mapping import ForeignMapping, short_value


def test_a_key_that_nobody_took_is_refused_by_name() -> None:
    keys = ForeignMapping({"r": 8, "use_spin": "fast"})
    assert keys.positive_int("r") == 8
    (problem,) = keys.all_problems()
    assert problem.startswith("use_spin: 'fast' is unknown here"), problem


@pytest.mark.parametrize("off", [None, False, {}, []])
def test_a_key_that_is_off_is_passed_over(off: object) -> None:
    assert ForeignMapping({"use_spin": off}).all_problems() == []


@pytest.mark.parametrize("value", [0, 0.0, "", "none", True])
def test_a_key_that_only_looks_off_is_refused(value: object) -> None:
    assert ForeignMapping({"spin": value}).all_problems()


def test_harmless_keys_and_defaults_are_passed_over_and_other_values_refused() -> None:
    given = {"revision": "main", "group_size": 16, "lora_bias": False, "sizes": [1]}
    assert not ForeignMapping(
        given, harmless={"revision": "where"}, defaults={"group_size": 16, "lora_bias": False, "sizes": [1]}
    ).all_problems()
    # False is not off where the other program's default is another.
    problems = ForeignMapping({"truncate": False}, defaults={"truncate": True}).all_problems()
    assert [problem.split(":")[0] for problem in problems] == ["truncate"]


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "8", [8], 10**400 * -1])
def test_what_is_no_positive_integer_is_a_problem(value: object) -> None:
    keys = ForeignMapping({"r": value})
    assert keys.positive_int("r") == 1
    assert len(keys.problems) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, True, "1", 10**400])
def test_what_is_no_number_from_zero_is_a_problem(value: object) -> None:
    keys = ForeignMapping({"alpha": value})
    assert keys.non_negative_float("alpha") == 1.0
    assert len(keys.problems) == 1


def test_null_is_false_for_a_switch_and_missing_for_anything_else() -> None:
    keys = ForeignMapping({"on": None, "norm": None, "kind": None, "r": None})
    assert keys.boolean("on", True) is False
    keys.one_of("norm", (True,), True)
    assert [problem.split(":")[0] for problem in keys.problems] == ["norm"]
    assert keys.one_of("kind", ("a", "b"), "a") == "a" and keys.positive_int("r", 8) == 8


def test_values_are_shown_short() -> None:
    assert len(short_value("x" * 10_000)) == 80
    assert short_value(10**5000) == "a whole number of more than 80 digits"
