"""The real training step without data, for every distinct kind of rank: operations, storage lifetimes, collectives.

dry_run.py              runs the step of each kind of rank; one_microbatch.py: the layers of one microbatch alone
providers.py            what the entry scripts give to a trainer, by architecture; fake_batches.py: batches without values
fake_tensors.py         tensors without storage; memoization.py: a layer that was seen before is not run again
recorder.py             operations of a step; scan_recorder.py: state space scans as one operation
memory.py               lifetimes of storages; trace.py: what a recorded step is
source_lines.py         code that the recorder knows; torch_internals.py: what torch does not document
collective_matching.py  whether the collectives of all ranks fit together, or hang
layout_build_check.py   parameters of every rank, built on the meta device
"""
