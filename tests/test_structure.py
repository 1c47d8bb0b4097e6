"""The structure gets better, never worse: each measure of `tests/helpers/structure.py` stands at its limit.

LIMITS holds today's number and the one aimed at. A number that rises fails, and so does one that falls while its limit stays,
so that what was gained is kept. EXAMPLES shows each measure small trees of which it must count the faults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.helpers import structure
from tests.helpers.architecture import ROOT, Tree, tree_of
from tests.helpers.entered import entered_per_step, modules_of_help
from tests.helpers.limits import Limit, Measured
from tests.helpers.programme import trained
from tests.helpers.structure import files_of
from tests.parity import half_rows
from tests.parity.table import ROWS

Measure = Callable[[Tree], Measured]

# A GPT as most are trained today, on one rank.
PLAIN_GPT = (
    "--mock-data --train-iters 4 --global-batch-size 2 --num-attention-heads 4 --hidden-size 32 "
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
).split()


@cache
def functions_of_step() -> frozenset[tuple[str, str, int]]:
    """What the third of four steps of pretrain_gpt enters, with its batch; earlier ones fill what is kept."""
    steps = entered_per_step(lambda: trained(PLAIN_GPT), ROOT / "megatron", "train_step")
    assert len(steps) == 5, f"four steps are to call train_step once each; {len(steps) - 1} calls"
    return steps[3]


def functions_a_step_enters(_: Tree) -> Measured:
    """Functions that one plain step enters."""
    places = sorted(f"{file}:{line} {name}" for file, name, line in functions_of_step())
    return Measured(len(places), tuple(places))


def modules_loaded_by_help(_: Tree) -> Measured:
    """Our modules that `pretrain_gpt.py --help` loads."""
    places = [name for name in modules_of_help(ROOT, "pretrain_gpt.py") if name.split(".")[0] == "megatron"]
    return Measured(len(places), tuple(places))


def heavy_packages_loaded_by_help(_: Tree) -> Measured:
    """torch and numpy, of which `--help` needs neither."""
    places = [name for name in modules_of_help(ROOT, "pretrain_gpt.py") if name in ("torch", "numpy")]
    return Measured(len(places), tuple(places))


def parity_rows(_: Tree) -> Measured:
    """Layouts that are compared with the serial run, in all formats."""
    return Measured(len(ROWS) + len(half_rows.ROWS))


def planted_defects(_: Tree) -> Measured:
    """Mistakes that the rows must notice."""
    from tests.parity.defects import DEFECTS  # imports what it breaks

    return Measured(len(DEFECTS))


MEASURES: Mapping[str, Measure] = {
    "groups of folders that import each other": structure.folder_circles,
    "folders in such groups": structure.folders_in_circles,
    "imports of features by core and training": structure.imports_of_features,
    **{
        f"files of core and training that name {word}": structure.files_naming(word) for word in structure.FEATURE_WORDS
    },
    "files behind pretrain_gpt.py": structure.files_behind("pretrain_gpt.py"),
    "thousand lines behind pretrain_gpt.py": structure.thousand_lines_behind("pretrain_gpt.py"),
    "files behind GPTModel": structure.files_behind("GPTModel"),
    "thousand lines behind GPTModel": structure.thousand_lines_behind("GPTModel"),
    "files behind train_step": structure.files_behind("train_step"),
    "thousand lines behind train_step": structure.thousand_lines_behind("train_step"),
    "files behind pretrain": structure.files_behind("pretrain"),
    "thousand lines behind pretrain": structure.thousand_lines_behind("pretrain"),
    "modules loaded by --help": modules_loaded_by_help,
    "torch and numpy loaded by --help": heavy_packages_loaded_by_help,
    "files that the one of pretrain imports": structure.imports_of_loop,
    "lines of the file of pretrain": structure.lines_of_loop,
    "late imports of our own": structure.late_imports,
    "files with late imports of our own": files_of(structure.late_imports),
    "small files with one importer": structure.small_files_with_one_importer,
    "names in docstrings that do not exist": structure.missing_names,
    "files missing in package maps": structure.files_missing_in_maps,
    "functions per thousand lines": structure.functions_per_thousand_lines,
    "comments per hundred lines": structure.comments_per_hundred_lines,
    "files that a GPT step enters": files_of(functions_a_step_enters),
    "functions that a GPT step enters": functions_a_step_enters,
    "comparisons of an architecture": structure.architecture_comparisons,
    "files that compare an architecture": files_of(structure.architecture_comparisons),
    "names of mixers outside families": structure.mixer_names,
    "files with names of mixers outside families": files_of(structure.mixer_names),
    "methods of FeatureConfig with one user": structure.feature_methods_with_one_user,
    "rows of the parity table": parity_rows,
    "planted defects": planted_defects,
}

# The number that holds today, and the one aimed at. Steps are coarse where every commit moves a number a little.
LIMITS: Mapping[str, Limit] = {
    "groups of folders that import each other": Limit(0, aim=0),
    "folders in such groups": Limit(0, aim=0),
    "imports of features by core and training": Limit(33, aim=0),
    "files of core and training that name adapter": Limit(18, aim=5),
    "files of core and training that name bert": Limit(12, aim=5),
    "files of core and training that name t5": Limit(12, aim=5),
    "files of core and training that name vision": Limit(28, aim=5),
    "files behind pretrain_gpt.py": Limit(255, aim=227, step=5),
    "thousand lines behind pretrain_gpt.py": Limit(43.5, aim=40, step=0.5),
    "files behind GPTModel": Limit(110, aim=95, step=5),
    "thousand lines behind GPTModel": Limit(17.5, aim=15.2, step=0.5),
    "files behind train_step": Limit(145, aim=131, step=5),
    "thousand lines behind train_step": Limit(25, aim=22, step=0.5),
    "files behind pretrain": Limit(210, aim=180, step=5),
    "thousand lines behind pretrain": Limit(36.5, aim=32, step=0.5),
    # Features that act on the command line are read there: the aim is above what is loaded without them.
    "modules loaded by --help": Limit(49, aim=48, step=49),
    "torch and numpy loaded by --help": Limit(0, aim=0),
    "files that the one of pretrain imports": Limit(9, aim=12),
    "lines of the file of pretrain": Limit(70, aim=190, step=10),
    # Each is a reader or a writer that most runs do without: what lies behind an entry falls by it.
    "late imports of our own": Limit(25, aim=16),
    "files with late imports of our own": Limit(16, aim=9),
    "small files with one importer": Limit(26, aim=0),
    "names in docstrings that do not exist": Limit(0, aim=0),
    "files missing in package maps": Limit(0, aim=0),
    "functions per thousand lines": Limit(59.5, aim=48, step=0.5),
    "comments per hundred lines": Limit(1.6, aim=4, step=0.1, is_minimum=True),
    "files that a GPT step enters": Limit(68, aim=55),
    "functions that a GPT step enters": Limit(320, aim=270, step=5),
    "comparisons of an architecture": Limit(3, aim=6),
    "files that compare an architecture": Limit(3, aim=3),
    "names of mixers outside families": Limit(2, aim=0),
    "files with names of mixers outside families": Limit(2, aim=0),
    "methods of FeatureConfig with one user": Limit(0, aim=0),
    "rows of the parity table": Limit(549, aim=541, is_minimum=True),
    "planted defects": Limit(219, aim=217, is_minimum=True),
}


@pytest.fixture(scope="module")
def tree() -> Tree:
    """The product, read once."""
    return structure.product()


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that is followed is that of a CPU."""
    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")


@pytest.mark.parametrize("wall", MEASURES)
def test_the_structure_stands_at_its_limit(wall: str, tree: Tree) -> None:
    problem = LIMITS[wall].problem(MEASURES[wall](tree))
    assert not problem, f"{wall}: {problem}"


def test_every_limit_has_a_measure() -> None:
    assert LIMITS.keys() == MEASURES.keys()


EMPTY = '"""D."""\n'
A, B, C = "megatron/core/config/a.py", "megatron/core/config/rules/b.py", "megatron/core/models/c.py"
ENTRY, GPT = "pretrain_gpt.py", "megatron/core/models/gpt.py"
INIT = "megatron/core/models/__init__.py"
LATE = "def f():\n    from megatron.core.models.c import x"
TYPES = "if TYPE_CHECKING:\n    import megatron.core.models.c"
SECTION = "class Adapters(FeatureConfig):\n    def problems(self): pass"
FEATURE = "class FeatureConfig:\n    def problems(self): pass\n    def adopt(self): pass"

# (measure, tree, number): what breaks the rule behind a measure is counted.
BROKEN: Sequence[tuple[Measure, Mapping[str, str], float]] = (
    (structure.folder_circles, {A: "import megatron.core.config.rules.b", B: "import megatron.core.config.a"}, 1),
    (
        structure.folders_in_circles,
        {A: "def f():\n    import megatron.core.config.rules.b", B: "import megatron.core.config.a"},
        2,
    ),
    (
        structure.imports_of_features,
        {GPT: "import megatron.core.models.vision", "megatron/core/models/vision.py": EMPTY},
        1,
    ),
    (
        structure.imports_of_features,
        {A: "def f():\n    from megatron.adapters import x", "megatron/adapters/__init__.py": EMPTY},
        1,
    ),
    (
        structure.imports_of_features,
        {C: "import megatron.megatron_lm.checkpoint.x", "megatron/megatron_lm/checkpoint/x.py": EMPTY},
        1,
    ),
    (structure.files_naming("adapter"), {A: "def add_adapters(): pass", B: "x = run.LoraAdapter", C: "x = 1"}, 2),
    (structure.files_naming("bert"), {A: "x = architecture == 'bert'", C: "from a import BERTModel"}, 2),
    (structure.files_naming("t5"), {A: "f(is_t5=True)", C: "T5Model()"}, 2),
    (structure.files_naming("vision"), {A: "import a.vision", C: "def f(vision): pass"}, 2),
    (
        structure.files_behind(ENTRY),
        {ENTRY: "import megatron.core.models.c", INIT: EMPTY, C: "import megatron.core.config.a", A: EMPTY},
        3,
    ),
    (structure.thousand_lines_behind(ENTRY), {ENTRY: "from megatron.core.models.c import x", C: "x = 1\n" * 1500}, 1.5),
    (structure.files_behind(ENTRY), {ENTRY: "import megatron.core.models.c", INIT: EMPTY + "x = 1", C: EMPTY}, 3),
    (structure.files_behind("GPTModel"), {C: "class GPTModel: pass", A: EMPTY}, 1),
    (
        structure.imports_of_loop,
        {
            C: "import megatron.core.config.a\ndef pretrain(): pass\ndef g():\n    import megatron.core.config.rules.b",
            A: EMPTY,
            B: EMPTY,
        },
        2,
    ),
    (structure.lines_of_loop, {C: "def pretrain(): pass\n\n\n"}, 3),
    (structure.late_imports, {A: LATE, B: LATE, C: EMPTY}, 2),
    (files_of(structure.late_imports), {A: LATE + ", y", C: EMPTY}, 1),
    (structure.small_files_with_one_importer, {A: "import megatron.core.models.c", C: EMPTY}, 1),
    (
        structure.missing_names,
        {A: "class Saver:\n    'See `no_such_thing` and `Saver.start`.'\ndef f():\n    'As gone_by(x) in b.py.'"},
        4,
    ),
    (structure.files_missing_in_maps, {INIT: '"""Models.\n\nc.py  the third\n"""', C: EMPTY, GPT: EMPTY}, 1),
    (
        structure.functions_per_thousand_lines,
        {A: "def f(): pass\n" + "class C:\n    def m(self): pass\n" + "\n" * 97},
        20,
    ),
    (structure.comments_per_hundred_lines, {C: "x = 1  # why\n# because\n" + "x = '# no'\n" * 48, A: "# elsewhere"}, 4),
    (structure.architecture_comparisons, {A: "x = model.architecture == 't5'\ny = architecture in ('gpt', 'bert')"}, 2),
    (files_of(structure.architecture_comparisons), {A: "x = m.architecture == 't5'\ny = m.architecture != 't5'"}, 1),
    (
        structure.mixer_names,
        {A: "x = plan.mixer == 'mamba'\ny = {'mla': 1}", C: "x = plan.mixer not in ('attention', other)"},
        3,
    ),
    (files_of(structure.mixer_names), {A: "x = 'mla', 'mamba'"}, 1),
    (structure.feature_methods_with_one_user, {A: FEATURE, B: SECTION, C: SECTION.replace("Adapters", "Vision")}, 1),
    (structure.feature_methods_with_one_user, {A: FEATURE, B: SECTION}, 2),
)

# (measure, tree): trees that look like it, and have nothing to count.
KEPT: Sequence[tuple[Measure, Mapping[str, str]]] = (
    (
        structure.folder_circles,
        {
            A: "import megatron.core.models.c",
            C: TYPES.replace("models.c", "config.a"),
            B: "import megatron.core.config.a",
        },
    ),
    (
        structure.imports_of_features,
        {A: TYPES.replace("models.c", "models.vision"), "megatron/core/models/vision.py": EMPTY},
    ),
    (
        structure.imports_of_features,
        {"megatron/core/models/bert.py": "import megatron.core.datasets.bert", "megatron/core/datasets/bert.py": EMPTY},
    ),
    (
        structure.imports_of_features,
        {"megatron/inference/a.py": "import megatron.adapters.x", "megatron/adapters/x.py": EMPTY},
    ),
    (structure.files_naming("vision"), {A: "x = division(revision)  # not of vision", C: "x = 'a sentence on vision'"}),
    (
        structure.files_naming("bert"),
        {A: "x = kind == 'BertWordPieceCase'", "megatron/inference/a.py": "x = BERTModel"},
    ),
    (structure.late_imports, {A: TYPES + "\ndef f():\n    import torch", C: EMPTY}),
    (
        structure.small_files_with_one_importer,
        {A: "import megatron.core.config.rules.b\nimport megatron.core.models.c", B: EMPTY, C: "x = 1\n" * 120},
    ),
    (
        structure.small_files_with_one_importer,
        {A: "import megatron.core.models.c", GPT: "import megatron.core.models.c", C: EMPTY},
    ),
    (structure.missing_names, {A: "def f(x):\n    'Double `x`, as `float` and f(x) do; see a.py and `Other.x`.'"}),
    (structure.files_missing_in_maps, {INIT: '"""Models; no map."""', C: EMPTY}),
    (structure.files_missing_in_maps, {INIT: '"""c.py and gpt.py."""', C: EMPTY, GPT: EMPTY}),
    (structure.architecture_comparisons, {A: "x = model.architecture.pads\ny = name == 'architecture'"}),
    (
        structure.mixer_names,
        {
            "megatron/core/families/a.py": "x = 'mamba'",
            "megatron/core/config/mixers/a.py": "x = 'mla'",
            C: "x = op == 'attention'",
        },
    ),
    (structure.feature_methods_with_one_user, {A: "class C:\n    def f(self): pass"}),
)


def measure_name(value: object) -> str:
    """A measure as pytest shows it."""
    return value.__qualname__.split(".")[0] if callable(value) else ""


@pytest.mark.parametrize("measure, texts, number", BROKEN, ids=measure_name)
def test_a_measure_counts_what_breaks_its_rule(measure: Measure, texts: Mapping[str, str], number: float) -> None:
    measured = measure(tree_of(texts))
    assert measured.number == number and measured.places, measured


@pytest.mark.parametrize("measure, texts", KEPT, ids=measure_name)
def test_a_measure_does_not_count_what_keeps_its_rule(measure: Measure, texts: Mapping[str, str]) -> None:
    assert measure(tree_of(texts)).number == 0, measure(tree_of(texts))


def test_every_measure_of_a_tree_is_shown_to_count() -> None:
    reads_no_tree = {
        functions_a_step_enters,
        modules_loaded_by_help,
        heavy_packages_loaded_by_help,
        parity_rows,
        planted_defects,
    }
    shown = {measure_name(measure) for measure, *_ in BROKEN}
    assert {measure_name(measure) for measure in MEASURES.values() if measure not in reads_no_tree} <= shown


def test_files_that_import_late_are_not_behind_a_file() -> None:
    tree = tree_of({ENTRY: f"{LATE}\n{TYPES}", C: EMPTY})
    assert structure.reached(tree, ENTRY) == {ENTRY}


def test_help_is_seen_to_load_what_it_imports(tmp_path: Path) -> None:
    (tmp_path / "start.py").write_text("import heavy\nraise SystemExit(print('usage'))")
    (tmp_path / "heavy.py").write_text("import json.tool")
    assert {"heavy", "json.tool"} <= set(modules_of_help(tmp_path, "start.py"))


def test_functions_of_one_step_are_those_from_its_start_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "steps.py"
    path.write_text("def read(): pass\ndef step(n):\n    if n == 1: late()\ndef late(): pass\n")
    names: dict[str, Callable[..., None]] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)

    def work() -> None:
        for n in range(3):
            names["step"](n)
            names["read"]()

    steps = entered_per_step(work, tmp_path, "step")
    assert [sorted(name for _, name, _ in step) for step in steps] == [
        [],
        ["read", "step"],
        ["late", "read", "step"],
        ["read", "step"],
    ]


@pytest.mark.parametrize(
    "limit, number, problem",
    [
        (Limit(5, aim=0), 5, ""),
        (Limit(5, aim=0), 6, "6 rose above the limit of 5 (the aim is 0)"),
        (Limit(5, aim=0), 3, "write 3 into LIMITS"),
        (Limit(5, aim=0), 0, "write 0 into LIMITS"),
        (Limit(63, aim=40, step=0.5), 62.578, ""),
        (Limit(63, aim=40, step=0.5), 63.001, "rose above"),
        (Limit(63, aim=40, step=0.5), 62.3, "write 62.5 into LIMITS"),
        (Limit(1.5, aim=4, step=0.1, is_minimum=True), 1.59, ""),
        (Limit(1.5, aim=4, step=0.1, is_minimum=True), 1.49, "fell below"),
        (Limit(1.5, aim=4, step=0.1, is_minimum=True), 2.07, "write 2 into LIMITS"),
        (Limit(7, aim=7, is_minimum=True), 6, "6 fell below the limit of 7"),
        (Limit(7, aim=7, is_minimum=True), 8, "write 8 into LIMITS"),
    ],
)  # fmt: skip
def test_a_limit_says_what_to_do(limit: Limit, number: float, problem: str) -> None:
    text = limit.problem(Measured(number))
    assert (problem in text) if problem else text == "", text
