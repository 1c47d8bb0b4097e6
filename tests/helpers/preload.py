"""What a pool's fork server imports once, so that its ranks start in no time."""

from __future__ import annotations

import torch
import torch.distributed
import torch.distributed.checkpoint  # noqa: F401

torch.set_num_threads(1)
