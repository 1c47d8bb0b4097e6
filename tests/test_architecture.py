"""The repository keeps the rules of the house, and every rule can fail.

`test_the_tree_keeps_the_rule` runs the rules of `tests/helpers/architecture.py` over the repository. The tables BROKEN and
KEPT show each rule small trees that it must refuse and accept, so that no rule can fall asleep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from tests.helpers.architecture import (
    RULES,
    Offences,
    Tree,
    arrows,
    asserts_say_what_we_believed,
    cuda_is_behind_the_device,
    environment_is_read_once,
    errors_are_caught_by_name,
    every_file_has_a_layer,
    few_functions_branch_much,
    files_and_functions_fit_a_reader,
    files_are_loaded_as_data,
    files_form_no_cycle,
    flags_are_read_where_they_may_be,
    global_state_stays_in_the_shims,
    imports_go_down,
    imports_stand_at_the_top,
    module_names_keep_their_values,
    paths_of_one_machine_stay_out,
    public_things_have_a_docstring,
    repository,
    separate_packages_stay_separate,
    signatures_are_annotated,
    tensors_have_shapes,
    text_is_ascii,
    the_package_is_installed_from_its_checkout,
    tree_of,
)
from tests.helpers.asserted_times import no_test_asserts_a_time

ALL = (*RULES, no_test_asserts_a_time)


def words(rule: Callable[..., object]) -> str:
    """A rule as pytest shows it."""
    return rule.__name__


@pytest.fixture(scope="module")
def tree() -> Tree:
    """The repository, read once."""
    return repository()


@pytest.mark.parametrize("rule", ALL, ids=words)
def test_the_tree_keeps_the_rule(rule: Callable[[Tree], Offences], tree: Tree) -> None:
    offences = [f"{path}:{line}: {text}" for path, line, text in sorted(set(rule(tree)))]
    assert not offences, f"{rule.__doc__}\n" + "\n".join(offences)


def test_the_whole_tree_is_read(tree: Tree) -> None:
    packages = {source.package for source in tree.values()}
    assert {"core/config", "core/parallel", "core/models", "training", "tools"} <= packages, packages
    assert len(list(arrows(tree))) > 100, "the imports between files were not found"


CONFIG, LAYERS, MODELS, OPTIMIZER = (
    "megatron/core/config/a.py",
    "megatron/core/transformer/a.py",
    "megatron/core/models/a.py",
    "megatron/core/optimizer/a.py",
)
EMPTY = '"""D."""\n'
LONG = "def f() -> None:\n" + "    pass\n" * 80
BRANCHES = "def f(x: int) -> None:\n" + "    if x and not x: pass\n" * 10
TOO_MANY = "\n".join(BRANCHES[: BRANCHES.rindex("    if x")].replace("f(", f"f{n}(") for n in range(11))

# (rule, tree, start of the offence): each tree breaks the rule.
BROKEN: Sequence[tuple[Callable[[Tree], Offences], Mapping[str, str], str]] = (
    (imports_go_down, {CONFIG: "from megatron.core.models.a import x", MODELS: EMPTY}, f"{CONFIG}:1"),
    (imports_go_down, {CONFIG: "import os\nimport megatron.core.models.a", MODELS: EMPTY}, f"{CONFIG}:2"),
    (imports_go_down, {LAYERS: "from megatron.core.optimizer import a", OPTIMIZER: EMPTY}, f"{LAYERS}:1"),
    (imports_go_down, {LAYERS: "def f():\n    from megatron.core.models.a import x", MODELS: EMPTY}, f"{LAYERS}:2"),
    (
        imports_go_down,
        {"megatron/core/__init__.py": "import megatron.core.config.a", CONFIG: EMPTY},
        "megatron/core/__init__.py:1",
    ),
    (imports_go_down, {MODELS: "from tests.helpers import tiny", "tests/helpers/tiny.py": EMPTY}, f"{MODELS}:1"),
    (imports_go_down, {"tasks/a.py": "import pretrain_gpt", "pretrain_gpt.py": EMPTY}, "tasks/a.py:1"),
    (every_file_has_a_layer, {"megatron/core/misc/a.py": EMPTY}, "megatron/core/misc/a.py:1"),
    (every_file_has_a_layer, {"megatron/helpers.py": EMPTY}, "megatron/helpers.py:1"),
    (every_file_has_a_layer, {"run.py": EMPTY}, "run.py:1"),
    (
        separate_packages_stay_separate,
        {MODELS: "from megatron.core.optimizer.a import x", OPTIMIZER: EMPTY},
        f"{MODELS}:1",
    ),
    (
        separate_packages_stay_separate,
        {"megatron/inference/a.py": "import megatron.training.b", "megatron/training/b.py": EMPTY},
        "megatron/inference/a.py:1",
    ),
    (
        separate_packages_stay_separate,
        {"megatron/core/families/a.py": "import megatron.core.parallel.b", "megatron/core/parallel/b.py": EMPTY},
        "megatron/core/families/a.py:1",
    ),
    (
        files_form_no_cycle,
        {
            "megatron/core/config/a.py": "from megatron.core.config.b import x",
            "megatron/core/config/b.py": "from megatron.core.config.c import x",
            "megatron/core/config/c.py": "\nfrom megatron.core.config import a",
        },
        "megatron/core/config/c.py:2",
    ),
    (imports_stand_at_the_top, {CONFIG: "def f():\n    import json"}, f"{CONFIG}:2"),
    (imports_stand_at_the_top, {CONFIG: "class C:\n    from json import loads"}, f"{CONFIG}:2"),
    (imports_stand_at_the_top, {CONFIG: "from . import b"}, f"{CONFIG}:1"),
    (imports_stand_at_the_top, {CONFIG: "x = importlib.import_module('json')"}, f"{CONFIG}:1"),
    (
        imports_stand_at_the_top,
        {"megatron/core/kernels/a.py": "def f():\n    import megatron.core.config"},
        "megatron/core/kernels/a.py:2",
    ),
    (flags_are_read_where_they_may_be, {MODELS: "import argparse"}, f"{MODELS}:1"),
    (flags_are_read_where_they_may_be, {MODELS: "from argparse import Namespace"}, f"{MODELS}:1"),
    (flags_are_read_where_they_may_be, {MODELS: "def f(args: Namespace): pass"}, f"{MODELS}:1"),
    (flags_are_read_where_they_may_be, {"megatron/training/loop.py": "x = sys.argv"}, "megatron/training/loop.py:1"),
    (flags_are_read_where_they_may_be, {"tools/library.py": "import argparse"}, "tools/library.py:1"),
    (global_state_stays_in_the_shims, {MODELS: "def f():\n    global x\n    x = 1"}, f"{MODELS}:2"),
    (
        global_state_stays_in_the_shims,
        {MODELS: "from megatron.core import parallel_state", "megatron/core/parallel_state.py": EMPTY},
        f"{MODELS}:1",
    ),
    (
        global_state_stays_in_the_shims,
        {
            "pretrain_gpt.py": "from megatron.training.global_vars import get_args",
            "megatron/training/global_vars.py": EMPTY,
        },
        "pretrain_gpt.py:1",
    ),
    (module_names_keep_their_values, {MODELS: "X = 1\nX = 2"}, f"{MODELS}:2"),
    (module_names_keep_their_values, {MODELS: "X = 1\nX += 2"}, f"{MODELS}:2"),
    (module_names_keep_their_values, {MODELS: "X = []\ndef f():\n    X.append(1)"}, f"{MODELS}:3"),
    (module_names_keep_their_values, {MODELS: "X: dict = {}\ndef f():\n    X['a'] = 1"}, f"{MODELS}:3"),
    (module_names_keep_their_values, {MODELS: "X = {}\ndef f():\n    X['a']['b'] += 1"}, f"{MODELS}:3"),
    (module_names_keep_their_values, {MODELS: "X = {}\ndef f():\n    del X['a']"}, f"{MODELS}:3"),
    (module_names_keep_their_values, {MODELS: "def f():\n    f.calls = 1"}, f"{MODELS}:2"),
    (
        module_names_keep_their_values,
        {MODELS: "from megatron.core.x import TABLE\ndef f():\n    TABLE.update(a=1)"},
        f"{MODELS}:3",
    ),
    (module_names_keep_their_values, {MODELS: "class C:\n    def m(self):\n        C.count = 1"}, f"{MODELS}:3"),
    (cuda_is_behind_the_device, {MODELS: "x = torch.cuda.is_available()"}, f"{MODELS}:1"),
    (cuda_is_behind_the_device, {MODELS: "x = y.weight.cuda()"}, f"{MODELS}:1"),
    (cuda_is_behind_the_device, {MODELS: "from torch import cuda"}, f"{MODELS}:1"),
    (environment_is_read_once, {MODELS: "import os\nx = os.environ['RANK']"}, f"{MODELS}:2"),
    (environment_is_read_once, {"tools/a.py": "x = os.getenv('RANK')"}, "tools/a.py:1"),
    (environment_is_read_once, {MODELS: "from os import environ"}, f"{MODELS}:1"),
    (files_and_functions_fit_a_reader, {MODELS: "x = 1\n" * 721}, f"{MODELS}:721"),
    (few_functions_branch_much, {MODELS: BRANCHES}, f"{MODELS}:1"),
    (few_functions_branch_much, {MODELS: TOO_MANY}, f"{MODELS}:1"),
    (files_and_functions_fit_a_reader, {MODELS: LONG}, f"{MODELS}:1"),
    (files_and_functions_fit_a_reader, {MODELS: "def f(a, b, c, d, e, *, g, h, i, j): pass"}, f"{MODELS}:1"),
    (files_and_functions_fit_a_reader, {MODELS: "def f(self, a, b, c, d, e, g, h, *i, **j): pass"}, f"{MODELS}:1"),
    (asserts_say_what_we_believed, {MODELS: "x = 1\nassert x"}, f"{MODELS}:2"),
    (signatures_are_annotated, {MODELS: "def _f(a) -> None: pass"}, f"{MODELS}:1"),
    (signatures_are_annotated, {MODELS: "def f(a: int): pass"}, f"{MODELS}:1"),
    (signatures_are_annotated, {MODELS: "def f(*, a: int, **b) -> None: pass"}, f"{MODELS}:1"),
    (public_things_have_a_docstring, {MODELS: "x = 1"}, f"{MODELS}:1"),
    (public_things_have_a_docstring, {MODELS: EMPTY + "def f(): pass"}, f"{MODELS}:2"),
    (public_things_have_a_docstring, {MODELS: EMPTY + "class C:\n    'D.'\n    def m(self): pass"}, f"{MODELS}:4"),
    (tensors_have_shapes, {MODELS: "def f(x: Tensor) -> int:\n    'Count.'"}, f"{MODELS}:1"),
    (tensors_have_shapes, {MODELS: "class C:\n    def m(self) -> torch.Tensor:\n        'Sum of x.'"}, f"{MODELS}:2"),
    (paths_of_one_machine_stay_out, {"examples/a.sh": "\ncd /" + "work/main"}, "examples/a.sh:2"),
    (paths_of_one_machine_stay_out, {MODELS: "x = '/" + "tmp/x'"}, f"{MODELS}:1"),
    (text_is_ascii, {"README.md": "fine\nna\u00efve"}, "README.md:2"),
    (files_are_loaded_as_data, {MODELS: "x = torch.load(path)"}, f"{MODELS}:1"),
    (files_are_loaded_as_data, {MODELS: "x = torch.load(path, weights_only=False)"}, f"{MODELS}:1"),
    (errors_are_caught_by_name, {MODELS: "try:\n    pass\nexcept:\n    pass"}, f"{MODELS}:3"),
    (
        the_package_is_installed_from_its_checkout,
        {"docs/a.md": "fine\npip install " + "megatron[files]"},
        "docs/a.md:2",
    ),
    (the_package_is_installed_from_its_checkout, {MODELS: "x = 'pip install -U " + "megatron'"}, f"{MODELS}:1"),
    (
        no_test_asserts_a_time,
        {"tests/a.py": "def f():\n    a = time.time()\n    g()\n    b = time.time() - a\n    assert x and b < 2"},
        "tests/a.py:5",
    ),
    (
        no_test_asserts_a_time,
        {"tests/a.py": "def f():\n    a = time.monotonic()\n    assert time.monotonic() - a < LONG"},
        "tests/a.py:3",
    ),
    (
        no_test_asserts_a_time,
        {
            "tests/a.py": "S = 10\ndef f():\n    end = perf_counter() + S\n    while not g():\n        assert perf_counter() < end"
        },
        "tests/a.py:5",
    ),
)

# (rule, tree): trees that look like offences, and are none.
KEPT: Sequence[tuple[Callable[[Tree], Offences], Mapping[str, str]]] = (
    (imports_go_down, {MODELS: "from megatron.core.config.a import x\nimport torch", CONFIG: EMPTY}),
    (imports_go_down, {"tests/unit/a.py": "import megatron.core.models.a", MODELS: EMPTY}),
    (imports_go_down, {"megatron/training/a.py": "import megatron.training.b", "megatron/training/b.py": EMPTY}),
    (
        every_file_has_a_layer,
        {
            "setup.py": EMPTY,
            "pretrain_gpt.py": EMPTY,
            "megatron/__init__.py": EMPTY,
            "megatron/core/__init__.py": EMPTY,
            "megatron/core/parallel_state.py": EMPTY,
        },
    ),
    (
        files_form_no_cycle,
        {
            CONFIG: "import megatron.core.config.b\nimport megatron.core.config.c",
            "megatron/core/config/b.py": "import megatron.core.config.c",
            "megatron/core/config/c.py": EMPTY,
        },
    ),
    (imports_stand_at_the_top, {CONFIG: "if TYPE_CHECKING:\n    import json"}),
    (imports_stand_at_the_top, {"megatron/training/hooks/writers.py": "def f():\n    import wandb"}),
    (
        flags_are_read_where_they_may_be,
        {"tools/a.py": "import argparse\ndef main(): pass", "megatron/cli/arguments.py": "import argparse"},
    ),
    (
        global_state_stays_in_the_shims,
        {
            "megatron/training/global_vars.py": "def f():\n    global x",
            "megatron/training/initialize.py": "import megatron.training.global_vars",
        },
    ),
    (module_names_keep_their_values, {MODELS: "X = 1\ndef f():\n    X = []\n    X.append(1)"}),
    (module_names_keep_their_values, {MODELS: "if a:\n    X = 1\nelse:\n    X = 2"}),
    (module_names_keep_their_values, {MODELS: "import torch\ndef f():\n    torch.backends.x = 1"}),
    (
        cuda_is_behind_the_device,
        {"megatron/core/kernels/a.py": "x = torch.cuda", "tests/a.py": "x = torch.cuda", MODELS: "x = y.to('cuda')"},
    ),
    (few_functions_branch_much, {MODELS: BRANCHES[: BRANCHES.rindex("    if x")]}),
    (few_functions_branch_much, {MODELS: BRANCHES.replace("if x and not x: pass", "assert x")}),
    (files_and_functions_fit_a_reader, {MODELS: "def f(self, a, b, c, d, e, g, h, i): pass"}),
    (files_and_functions_fit_a_reader, {MODELS: "x = 1\n" * 720}),
    (asserts_say_what_we_believed, {"tests/a.py": "assert x", MODELS: "assert x, 'said'"}),
    (public_things_have_a_docstring, {"tests/test_a.py": "def test_a(): pass", "tools/a.py": EMPTY + "def f(): pass"}),
    (public_things_have_a_docstring, {MODELS: EMPTY + "def _f(): pass\nclass _C:\n    def m(self): pass"}),
    (tensors_have_shapes, {MODELS: "def f(x: Tensor):\n    'Sum of x, [s, b].'\ndef g(x: Tensor):\n    'See `f`.'"}),
    (tensors_have_shapes, {MODELS: "def f(x: int):\n    'Double.'\ndef _g(x: Tensor): pass"}),
    (paths_of_one_machine_stay_out, {MODELS: "x = 'a/work/b'", "docs/a.md": "https://x.org/home/a"}),
    (files_are_loaded_as_data, {MODELS: "x = torch.load(path, weights_only=True)"}),
    (
        the_package_is_installed_from_its_checkout,
        {"docs/a.md": "pip install '.[files]'; pip install " + "megatron-core"},
    ),
    (
        no_test_asserts_a_time,
        {
            "benchmarks/a.py": "def f():\n    assert time.time() < 2",
            MODELS: "def f():\n    assert time.time() < 2, 'x'",
        },
    ),
    (
        no_test_asserts_a_time,
        {
            "tests/a.py": "S = 300\ndef f(s=60.0):\n    assert time.time() < S\n    assert time.time() < s\n    assert 1 < 2"
        },
    ),
    (no_test_asserts_a_time, {"tests/a.py": "def f():\n    a, b = g(), time.time()\n    assert a"}),
    (
        no_test_asserts_a_time,
        {"tests/a.py": "def f():\n    end = time.time() + 90\n    while True:\n        assert time.time() < end"},
    ),
)


@pytest.mark.parametrize("rule, texts, place", BROKEN, ids=lambda value: words(value) if callable(value) else "")
def test_a_rule_refuses_what_breaks_it(rule: Callable[[Tree], Offences], texts: Mapping[str, str], place: str) -> None:
    found = [f"{path}:{line}" for path, line, _ in rule(tree_of(texts))]
    assert place in found, f"{words(rule)} did not see {place}; it saw {found}"


@pytest.mark.parametrize("rule, texts", KEPT, ids=lambda value: words(value) if callable(value) else "")
def test_a_rule_accepts_what_keeps_it(rule: Callable[[Tree], Offences], texts: Mapping[str, str]) -> None:
    assert not list(rule(tree_of(texts)))


def test_every_rule_is_shown_to_fail() -> None:
    assert {words(rule) for rule in ALL} == {words(rule) for rule, _, _ in BROKEN}
