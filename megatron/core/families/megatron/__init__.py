"""Megatron-LM's own checkpoints, read (and its old format written), as global tensors under our names.

pickles.py     torch files from strangers, read without running anything in them
names.py       the names and row orders of all its versions, as a table and a few functions
legacy.py      mp_rank_XX/model_optim_rng.pt, one file a rank
torch_dist.py  the distributed format of Megatron Core
settings.py    the arguments of a run of Megatron as our settings
open.py        whichever of both a folder holds
export.py      the old format, written for its own programmes
"""
