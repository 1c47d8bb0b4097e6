"""Megatron-LM's own checkpoints, read (and its old format written), as global tensors under our names.

folders.py                how a folder with one is recognized
names.py                  the names and row orders of all its versions, as a table and a few functions
legacy.py                 mp_rank_XX/model_optim_rng.pt, one file a rank
torch_dist.py             the distributed format of Megatron Core, and Megatron FSDP's
rank_state.py             state of the optimizer in that format, which names no parameter
buffers.py                where its distributed optimizer keeps a parameter
flat_state.py             the same in the distributed format, where its distributed optimizer keeps buckets
parameter_order.py        which parameters a rank held, in the order of their definition
stored.py                 tensors of the distributed format, box by box
source.py                 a checkpoint of either format as a Source, and the counters of its run
arguments_to_settings.py  the arguments of a run of Megatron as our settings
argument_table.py         why the other arguments change nothing, or the value at which they do nothing
open.py                   whichever of both a folder holds
export.py                 both formats, written for its own programmes
experts.py                experts of the old format, one entry each or in two flat matrices
hybrid.py                 hybrid networks, whose layers have one part each, and layers with a state
export_arguments.py       the arguments that a checkpoint for Megatron holds, and which networks it can build
"""
