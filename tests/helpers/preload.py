"""What a pool's fork server imports once, so that its ranks start in no time."""

from __future__ import annotations

import gc

import torch
import torch.distributed
import torch.distributed.checkpoint  # noqa: F401

import tests.helpers.training  # noqa: F401

torch.set_num_threads(1)
gc.freeze()  # what is imported stays: no collection looks through it
