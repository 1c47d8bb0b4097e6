#!/usr/bin/env bash
# An environment to run in: found if there is one, else made in .venv at the root of the repository.
#
#   bash examples/setup.sh                         make it, and say where it is
#   source examples/setup.sh                       the same; PYTHON then names the interpreter, and the PATH begins there
#   ... examples/setup.sh requirements-dev.txt     with what the tests need, too
#
# $PYTHON, or else the `python` or `python3` on the PATH, is used as it is when it is 3.10 or newer, has torch 2.11 or
# newer, and has every package that the requirements name, in any version. Otherwise .venv gets the versions that the
# requirements pin. A second call finds everything done and takes a moment. On a machine that reaches no package index, an
# interpreter with torch and numpy is used all the same; it is said which packages it lacks, and what will not work.

setup_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
setup_index="https://download.pytorch.org/whl/cpu" # torch without the gigabytes that a GPU needs

setup_say() { printf 'setup: %s\n' "$*" >&2; }

# Names of the packages that this python lacks; nothing if it will do. $1: python; the rest: requirement files.
setup_lacks() {
    "$1" - "${@:2}" 2>/dev/null <<'PYTHON' || echo "a python that runs"
import re, sys
if sys.version_info < (3, 10):
    print("python>=3.10")
    sys.exit()
from importlib.metadata import PackageNotFoundError, version
for path in sys.argv[1:]:
    for line in open(path, encoding="utf-8"):
        name = re.match(r"[A-Za-z][\w.-]*", line)
        if name:
            try:
                found = tuple(int(part) for part in re.findall(r"\d+", version(name[0]))[:2])
                if name[0] == "torch" and found < (2, 11):
                    print("torch>=2.11")
            except PackageNotFoundError:
                print(name[0])
PYTHON
}

# The first interpreter on the PATH from 3.10 on.
setup_interpreter() {
    local name
    for name in python python3 python3.13 python3.12 python3.11 python3.10 python3.14; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
            command -v "$name"
            return 0
        fi
    done
    setup_say "no Python from 3.10 on is on the PATH (python3 is $(python3 --version 2>&1 || echo missing));" \
        "install one, for example python3.12, and run this again"
    return 1
}

# An empty .venv with pip. $1: python.
setup_make_venv() {
    local venv="$setup_root/.venv"
    setup_say "making .venv with $("$1" --version) ($1)"
    if "$1" -m venv --clear "$venv" >/dev/null 2>&1; then return 0; fi
    # Some systems ship Python without its own copy of pip: another pip, or virtualenv, can still fill the folder.
    if "$1" -m venv --clear --without-pip "$venv" >/dev/null 2>&1 &&
        "$1" -m pip --python "$venv/bin/python" install --quiet pip >/dev/null 2>&1; then return 0; fi
    if "$1" -m virtualenv --quiet --clear "$venv" >/dev/null 2>&1; then return 0; fi
    rm -rf "$venv"
    setup_say "this Python cannot make an environment: it lacks the venv module or pip;" \
        "install them (Debian and Ubuntu: apt install python3-venv) and run this again"
    return 1
}

# torch alone, as it is by far the largest: without a GPU the small build, if its index can be reached. $1: python.
setup_install_torch() {
    local pin
    pin="$(sed -n 's/^\(torch==[^; ]*\).*/\1/p' "$setup_root/requirements.txt")"
    if [ -z "$(setup_lacks "$1" <(echo torch))" ]; then return 0; fi
    if [ "$(uname -s)" = Linux ] && ! nvidia-smi -L >/dev/null 2>&1 && setup_reaches "$1" "$setup_index/"; then
        setup_say "installing $pin for CPU, about 200 MB"
        setup_pip "$1" --index-url "$setup_index" "$pin+cpu" && return 0
        setup_say "that did not work; taking $pin from the usual place instead"
    else
        setup_say "installing $pin, which may take some minutes"
    fi
    setup_pip "$1" "$pin"
}

setup_reaches() {
    "$1" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=3)' "$2" >/dev/null 2>&1
}

setup_pip() {
    "$1" -m pip install --quiet --disable-pip-version-check --no-input "${@:2}"
}

# What does not work without a package, in a few words.
setup_without() {
    case "$1" in
        nltk) echo "sentence splitting of --split-sentences" ;;
        tokenizers | sentencepiece | tiktoken) echo "tokenizers of that kind" ;;
        tensorboard) echo "--tensorboard-dir" ;;
        matplotlib) echo "plots" ;;
        safetensors) echo "reading and writing published checkpoints" ;;
        pillow) echo "images" ;;
        Jinja2) echo "chat templates" ;;
        pytest* | hypothesis) echo "the tests" ;;
        *) echo "what imports it" ;;
    esac
}

# An interpreter with torch and numpy where no index can be reached to get the rest: prints its path and says what it lacks.
# Arguments: requirement files.
setup_offline() {
    local name lacks package
    for name in ${PYTHON:+"$PYTHON"} python python3; do
        command -v "$name" >/dev/null 2>&1 || continue
        [ -z "$(setup_lacks "$name" <(printf 'torch\nnumpy\n'))" ] || continue
        setup_reaches_index "$name" && return 1
        lacks="$(setup_lacks "$name" "$@")"
        setup_say "no package index can be reached; using $name, which lacks:"
        for package in $lacks; do setup_say "  $package: $(setup_without "$package") will not work"; done
        command -v "$name"
        return 0
    done
    return 1
}

# Whether pip could get anything: from its index, or from a folder that it is told of. $1: python.
setup_reaches_index() {
    if [ -n "${PIP_NO_INDEX:-}${PIP_FIND_LINKS:-}" ]; then return 0; fi
    local index
    index="${PIP_INDEX_URL:-$("$1" -m pip config get global.index-url 2>/dev/null || echo https://pypi.org/simple/)}"
    case "$index" in http*) setup_reaches "$1" "$index" ;; *) return 0 ;; esac
}

# Sets PYTHON to an interpreter that has everything. $1: name of the requirements file.
setup_environment() {
    local wanted="$setup_root/$1" venv="$setup_root/.venv" files name interpreter stamp
    if [ ! -f "$wanted" ]; then
        setup_say "there is no requirements file $wanted"
        return 1
    fi
    files=("$wanted")
    for name in $(sed -n 's/^-r *//p' "$wanted"); do files+=("$setup_root/$name"); done
    for name in ${PYTHON:+"$PYTHON"} python python3; do
        if command -v "$name" >/dev/null 2>&1 && [ -z "$(setup_lacks "$name" "${files[@]}")" ]; then
            PYTHON="$(command -v "$name")"
            return 0
        fi
    done
    if name="$(setup_offline "${files[@]}")"; then
        PYTHON="$name"
        return 0
    fi
    PYTHON="$venv/bin/python"
    stamp="$venv/.installed-$1" # a copy of the requirements, written last: it differs when they changed
    if [ -f "$stamp" ] && cat "${files[@]}" | cmp -s - "$stamp" && "$PYTHON" -c '' 2>/dev/null; then return 0; fi
    if ! "$PYTHON" -c 'import sys, pip; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
        interpreter="$(setup_interpreter)" && setup_make_venv "$interpreter" || return 1
    fi
    setup_say "bringing .venv to $1"
    if ! { setup_install_torch "$PYTHON" && setup_pip "$PYTHON" -r "$wanted" &&
        "$PYTHON" -c 'import torch, numpy'; }; then
        setup_say "the packages of $1 could not be installed; pip says why above. Is there a way to its index?"
        return 1
    fi
    cat "${files[@]}" >"$stamp"
}

# A script that is sourced without arguments sees those of its caller: take only what looks like ours.
case "${1:-}" in
    *.txt) setup_wanted="$1" ;;
    *) setup_wanted="requirements.txt" ;;
esac
if setup_environment "$setup_wanted"; then
    export PYTHON PATH="$(dirname "$PYTHON"):$PATH"
    setup_say "using $PYTHON ($("$PYTHON" --version))"
else
    return 1 2>/dev/null || exit 1
fi
