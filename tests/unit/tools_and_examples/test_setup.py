"""Installing: examples/setup.sh in small repositories with packages made up for the test, tests/run.sh, and the package that is built."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from megatron.cli.command_names import command_name, with_command_names
from megatron.cli.former_names import verb_of_former_name
from megatron.cli.verbs import VERBS
from megatron.plan.command import parse_training_command, split_launch_command
from tests.helpers.architecture import ROOT, arrows, imported, repository

# What a file needs beyond the declared packages; no file of the library that needs less imports these files.
SERVER = "megatron/inference/server/"  # nothing else of the library imports it
OPTIONAL = {
    "megatron/core/pipeline_parallel/picture.py": {"matplotlib"},
    "megatron/cli/commands/plot_loss.py": {"matplotlib"},
    "megatron/cli/commands/serve.py": {"uvicorn"},
    f"{SERVER}app.py": {"fastapi", "starlette"},
    f"{SERVER}scoring.py": {"fastapi"},
    f"{SERVER}http_server.py": {"uvicorn"},
    "megatron/evaluation/harness.py": {"lm_eval"},
    "megatron/evaluation/plugin.py": {"lm_eval"},
    **{
        f"megatron/core/kernels/triton/{file}.py": {"triton"}
        for file in (*("loss", "norm", "paged", "permute", "pointwise", "quantise", "rotary", "adamw", "split_qkv"),)
    },
    **{
        f"megatron/core/kernels/state_space/triton_{file}.py": {"triton"}
        for file in ("conv", "scans", "scan_forward", "scan_gradients")
    },
}
SETTINGS_OF_PIP = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def script(path: Path, text: str) -> Path:
    """An executable script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def wheel(folder: Path, name: str, version: str) -> None:
    """An installable package of one module that knows its version."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", f"version = '{version}'\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A repository with setup.sh, requirements, and nothing else; a folder `bin` comes first on its PATH."""
    (tmp_path / "examples").mkdir()
    shutil.copy(ROOT / "examples/setup.sh", tmp_path / "examples/setup.sh")
    (tmp_path / "requirements.txt").write_text("# a comment\ntorch==2.13.0\nnumpy==2.4.6; python_version >= '3.11'\n")
    # A GPU keeps the script from asking the index of CPU builds.
    script(tmp_path / "bin/nvidia-smi", "exit 0")
    return tmp_path


def run(folder: Path, command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command with bash in a folder, with its `bin` first on the PATH."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "PYTHONPATH")}
    env |= {"PATH": f"{folder / 'bin'}:{env['PATH']}", **SETTINGS_OF_PIP, **environment}
    return subprocess.run(["bash", "-c", command], cwd=folder, env=env, text=True, capture_output=True, timeout=120)


def test_an_interpreter_that_has_everything_is_used_as_it_is(small: Path) -> None:
    done = run(
        small, 'set -euo pipefail; source examples/setup.sh; echo "$PYTHON"; command -v python', PYTHON=sys.executable
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == sys.executable
    assert Path(done.stdout.splitlines()[1]).parent == Path(sys.executable).parent, "the PATH does not begin there"
    assert not (small / ".venv").exists()


def test_the_arguments_of_a_script_that_sources_it_are_left_alone(small: Path) -> None:
    caller = script(small / "caller.sh", 'set -euo pipefail\nsource examples/setup.sh\necho "$@"')
    done = run(small, f"{caller} --some flag", PYTHON=sys.executable)
    assert (done.returncode, done.stdout) == (0, "--some flag\n"), done.stderr


@pytest.mark.slow
def test_a_missing_package_leads_to_an_environment_that_follows_the_requirements(small: Path) -> None:
    wheels = small / "wheels"
    wheels.mkdir()
    for name, version in (("torch", "2.13.0"), ("numpy", "2.4.6"), ("notyours", "1.0"), ("notyours", "2.0")):
        wheel(wheels, name, version)
    ask = 'source examples/setup.sh && "$PYTHON" -c "import notyours; print(notyours.version)"'
    wanted = small / "requirements.txt"
    before = wanted.read_text()

    wanted.write_text(before + "notyours==3.0\n")
    failed = run(small, ask, PYTHON=sys.executable, PIP_FIND_LINKS=str(wheels))
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "could not be installed" in failed.stderr and "notyours==3.0" in failed.stderr

    wanted.write_text(before + "notyours==1.0\n")
    done = run(small, ask, PYTHON=sys.executable, PIP_FIND_LINKS=str(wheels))
    assert (done.returncode, done.stdout) == (0, "1.0\n"), done.stderr
    assert str(small / ".venv/bin/python") in done.stderr

    again = run(small, ask, PYTHON=sys.executable)  # without wheels: nothing may be installed
    assert (again.returncode, again.stdout) == (0, "1.0\n"), again.stderr
    assert len(again.stderr.splitlines()) == 1, "more was done than to find what is there"

    wanted.write_text(before + "notyours==2.0\n")
    changed = run(small, ask, PYTHON=sys.executable, PIP_FIND_LINKS=str(wheels))
    assert (changed.returncode, changed.stdout) == (0, "2.0\n"), changed.stderr


def test_torch_is_used_as_it_is_where_no_index_can_be_reached_and_it_is_said_what_will_not_work(small: Path) -> None:
    (small / "requirements.txt").write_text("torch==2.13.0\nnumpy==2.4.6\nnotyours==1.0\n")
    nowhere = {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": "",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_NO_INDEX": "",
        "PIP_RETRIES": "0",
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple/",
    }
    done = run(small, 'source examples/setup.sh; echo "$PYTHON"', PYTHON=sys.executable, **nowhere)
    assert (done.returncode, done.stdout) == (0, f"{sys.executable}\n"), done.stderr
    assert "no package index can be reached" in done.stderr and "notyours: what imports it will not work" in done.stderr
    assert not (small / ".venv").exists()


def test_a_machine_without_a_new_enough_python_is_told_so(small: Path) -> None:
    for name in ("python", "python3", *(f"python3.{minor}" for minor in range(10, 16))):
        script(small / "bin" / name, 'if [ "$1" = --version ]; then echo Python 3.8.1; else exit 1; fi')
    done = run(small, "bash examples/setup.sh")
    assert done.returncode == 1
    assert "no Python from 3.10 on" in done.stderr and "Python 3.8.1" in done.stderr
    assert not (small / ".venv").exists()


def test_a_python_that_cannot_make_environments_is_explained(small: Path) -> None:
    (small / "requirements.txt").write_text("notyours==1.0\n")
    for name in ("python", "python3"):
        script(
            small / "bin" / name, f'case "$*" in "-m venv"*|"-m virtualenv"*) exit 1;; esac\nexec {sys.executable} "$@"'
        )
    done = run(small, "bash examples/setup.sh")
    assert done.returncode == 1
    assert "apt install python3-venv" in done.stderr
    assert not (small / ".venv").exists()


def test_a_torch_that_is_too_old_will_not_do(small: Path) -> None:
    site = small / "site"
    for name, version in (("torch", "2.9.1"), ("numpy", "2.4.6")):
        (site / f"{name}-{version}.dist-info").mkdir(parents=True)
        (site / f"{name}-{version}.dist-info/METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
    for name in (
        "python",
        "python3",
    ):  # an interpreter that sees the packages of `site` only, and makes no environments
        script(
            small / "bin" / name, f'case "$*" in "-m "*) exit 1;; esac\nPYTHONPATH={site} exec {sys.executable} -S "$@"'
        )
    assert run(small, "bash examples/setup.sh").returncode == 1
    (site / "torch-2.9.1.dist-info").rename(site / "torch-2.11.0.dist-info")
    (site / "torch-2.11.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0\n")
    assert run(small, "bash examples/setup.sh").returncode == 0


def test_requirements_that_do_not_exist_are_an_error(small: Path) -> None:
    done = run(small, "bash examples/setup.sh requirements-other.txt", PYTHON=sys.executable)
    assert done.returncode == 1 and "requirements-other.txt" in done.stderr


def test_the_suite_takes_arguments_and_gives_its_exit_code_back(small: Path) -> None:
    (small / "tests").mkdir()
    shutil.copy(ROOT / "tests/run.sh", small / "tests/run.sh")
    (small / "requirements-dev.txt").write_text("-r requirements.txt\npytest==9.2.0\n")
    (small / "tests/test_some.py").write_text(
        "import os\ndef test_good():\n    assert os.environ['OMP_NUM_THREADS'] == '1'\ndef test_bad():\n    assert False\n"
    )
    codes = [
        run(small, f"bash tests/run.sh -p no:cacheprovider {arguments}", PYTHON=sys.executable).returncode
        for arguments in ("-k good", "-k bad")
    ]
    assert codes == [0, 1]


def test_a_change_must_pass_the_suite(small: Path) -> None:
    shutil.copytree(ROOT / ".ci", small / ".ci")
    script(small / "tests/run.sh", "exit 7")
    assert run(small, ".ci/run").returncode == 7


def project() -> dict[str, Any]:
    """The project's metadata."""
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_what_is_tested_lies_within_what_is_allowed() -> None:
    allowed = {one.name.lower(): one for one in map(Requirement, project()["dependencies"])}
    pinned = [
        Requirement(line) for line in (ROOT / "requirements.txt").read_text().splitlines() if line and line[0] != "#"
    ]
    assert allowed.keys() <= {one.name.lower() for one in pinned}
    for one in pinned:
        (pin,) = one.specifier
        assert pin.operator == "==", f"{one} is not pinned"
        if one.name.lower() in allowed:
            assert allowed[one.name.lower()].specifier.contains(pin.version), (
                f"{one} against {allowed[one.name.lower()]}"
            )


def test_the_library_needs_only_what_it_declares() -> None:
    modules = {"PyYAML": "yaml", "Jinja2": "jinja2", "pillow": "PIL"}
    declared = {modules.get(one.name, one.name) for one in map(Requirement, project()["dependencies"])}
    tree = {
        path: source for path, source in repository().items() if path.startswith(("megatron/", "pretrain_", "finetune"))
    }
    entries = {path.removesuffix(".py") for path in tree if path.startswith(("pretrain_", "finetune"))}
    for path, source in tree.items():
        roots = {name.split(".")[0] for node in source.syntax.body for name in imported(node)}
        unknown = roots - declared - set(sys.stdlib_module_names) - {"megatron", *entries} - OPTIONAL.get(path, set())
        assert not unknown, f"{path} imports {unknown}, which pyproject.toml does not declare"
    assert not [
        f"{source.path}:{line}"
        for source, line, other in arrows(tree)
        if other.path in OPTIONAL
        and not source.path.startswith("megatron/cli/commands/")  # which say what is missing
        and not OPTIONAL[other.path] <= OPTIONAL.get(source.path, set())
        and not (source.path.startswith(SERVER) and other.path.startswith(SERVER))
    ]


def test_the_package_holds_the_library_and_the_entries_and_nothing_else(tmp_path: Path) -> None:
    subprocess.run(
        [
            sys.executable,
            "setup.py",
            "-q",
            "build",
            "--build-base",
            str(tmp_path / "base"),
            "--build-lib",
            str(tmp_path / "lib"),
        ],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=60,
    )
    built = {path.relative_to(tmp_path / "lib").as_posix() for path in (tmp_path / "lib").rglob("*.py")}
    library = {path.relative_to(ROOT).as_posix() for path in (ROOT / "megatron").rglob("*.py")}
    assert built == library | {
        f"megatron/scripts/{path.name}"
        for pattern in ("pretrain_*.py", "train_*.py", "finetune.py")
        for path in ROOT.glob(pattern)
    }
    assert [path.name for path in (tmp_path / "lib").glob("*.pth")] == [
        "megatron_lm_eval.pth"
    ]  # tests/unit/evaluation/test_plugin.py
    assert (tmp_path / "lib/megatron/py.typed").exists()
    # Installed into one folder with NVIDIA's package, which has the same import name, it says so instead of failing somewhere.
    (tmp_path / "lib/megatron/core/package_info.py").touch()
    mixed = subprocess.run(
        [sys.executable, "-c", "import megatron.core.config"], cwd=tmp_path / "lib", capture_output=True, text=True
    )
    assert mixed.returncode == 1 and "pip uninstall -y megatron-core megatron-train" in mixed.stderr
    # pip then uninstalls the other one, and with it the files that both have.
    for shared in ("package_info.py", "__init__.py", "pipeline_parallel/schedules.py"):
        (tmp_path / "lib/megatron/core" / shared).unlink()
    torn = subprocess.run(
        [sys.executable, "-c", "import megatron.core.config"], cwd=tmp_path / "lib", capture_output=True, text=True
    )
    assert torn.returncode == 1 and "pip install --force-reinstall --no-deps ." in torn.stderr


def test_an_installation_has_one_command_and_the_former_names_of_its_verbs() -> None:
    scripts = project()["scripts"]
    assert scripts.pop("megatron") == "megatron.cli.verbs:main"
    assert set(scripts.values()) == {"megatron.cli.former_names:main"}
    assert {verb_of_former_name(f"bin/{name}") for name in scripts} == set(VERBS)
    assert with_command_names("python pretrain_gpt.py", None) == "python pretrain_gpt.py"
    assert with_command_names("see model.py; torchrun --nnodes 2 finetune.py --x", "megatron plan") == (
        "see model.py; torchrun --nnodes 2 -m megatron finetune --x"
    )
    assert with_command_names("python tasks/main.py --task X", "megatron plan") == "megatron tasks --task X"
    for words in ("python bin/megatron plan --x", "python -u -m megatron plan"):
        assert command_name(words.split()) == "megatron plan"
    assert command_name(("python", "x.py", "megatron")) is None


def test_a_command_of_an_installation_is_read_as_the_script() -> None:
    for program in (
        "--no-python bin/megatron pretrain-bert",
        "--no-python bin/megatron-pretrain-bert",
        "-m megatron pretrain-bert",
    ):
        words = f"torchrun --nnodes 2 --nproc_per_node 4 {program} --num-layers 2".split()
        launcher, script, flags = split_launch_command(words)
        assert launcher == words[:6] and (script, flags) == ("pretrain_bert.py", ["--num-layers", "2"])
        command = parse_training_command(words)
        assert command.setting is not None and command.setting.world_size == 8 and not command.unread


def test_the_development_extra_has_what_the_suite_needs() -> None:
    extras = {name: [Requirement(one) for one in found] for name, found in project()["optional-dependencies"].items()}
    (own,) = [one for one in extras["dev"] if one.name == project()["name"]]
    declared = {one.name.lower() for found in (extras["dev"], *(extras[name] for name in own.extras)) for one in found}
    declared |= {one.name.lower() for one in map(Requirement, project()["dependencies"])}
    files = (ROOT / name for name in ("requirements.txt", "requirements-server.txt", "requirements-dev.txt"))
    pinned = [
        Requirement(line) for file in files for line in file.read_text().splitlines() if line and line[0] not in "#-"
    ]
    assert {one.name.lower() for one in pinned} - {"starlette"} <= declared, "starlette is fastapi's"
