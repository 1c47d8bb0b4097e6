"""Distributed checkpoints: global tensors, stored as named rectangles (boxes).

sharded_state.py       which boxes of which global tensor this rank holds: parameters and optimizer state
state_hooks.py         StateHooks: what a feature adds to saves, and changes in what is loaded
source.py              Source: the interface of a checkpoint of any format
rewrite.py             write any source in our own format, offline, one tensor at a time
load.py                fill a tree from a source; find the newest valid checkpoint
saver.py               asynchronous saving: copy, write beside training, commit
save_plan.py           which rank writes which box
saved.py               NativeCheckpoint: an opened checkpoint of our own format, memory-mapped and verifiable
rank_file.py           the data file of one rank
manifest.py            where every shard is stored, and its hash
checkpoint_folders.py  folders: committed, newest and expired checkpoints; needs no torch
lock.py                the lock that lets one job write into a folder
threaded_copy.py       copies between tensors by several threads
files.py               all file system operations
pickles.py             files of torch.save from strangers, read without running anything in them

There is no code for resharding: a checkpoint holds global tensors in boxes, and loading requests other boxes.
"""
