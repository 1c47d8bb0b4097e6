#!/usr/bin/env python3
"""Megatron's old name of pretrain_hybrid.py: the same program."""

import runpy

if __name__ == "__main__":
    runpy.run_module("pretrain_hybrid", run_name="__main__", alter_sys=True)
