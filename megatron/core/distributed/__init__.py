"""Gradients meet here.

buffers.py   contiguous parameter and gradient buffers in buckets; which range of each this rank owns
fp8_param_gather.py  buckets of weights that work in 8 bits
ddp.py       when buckets are reduced, and when parameters are gathered
fsdp.py      shares of every weight instead of copies: torch's FSDP2
finalize.py  the sums that layouts ask for: replicated parameters, shared heads, tied matrices
"""
