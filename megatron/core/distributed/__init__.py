"""Data parallelism: gradient reduction and parameter gathering.

buffers.py           contiguous parameter and gradient buffers in buckets; the range of each that this rank owns
fp8_param_gather.py  buckets whose parameters are stored in 8 bits
ddp.py               when buckets are reduced, and when parameters are gathered
fsdp.py              fully sharded data parallelism with torch's FSDP2
finalize.py          sums over other axes: replicated parameters, replicated heads, tied matrices
"""
