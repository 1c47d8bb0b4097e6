"""`python -m megatron <verb>`: the command `megatron`, where nothing is installed. See `cli/verbs.py`."""

import runpy

runpy.run_module("megatron.cli", run_name="__main__", alter_sys=True)
