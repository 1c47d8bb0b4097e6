"""The basis of every kind of parallelism: the device mesh, collectives, and which shard of a tensor each rank holds.

grid.py             which ranks form the groups of each mesh axis: pure arithmetic
mesh.py             Axis and Mesh: this rank's coordinates and its process groups
device.py           the calls that differ between CPU and GPU
collectives.py      collectives, and differentiable forward/backward pairs of them
boxes.py            rectangles (Box) inside global tensors
spec.py             ParamSpec: global shape, sharding, initial values of a parameter, and what follows from it
rng.py              named random streams; initial values drawn by a parameter's global name
recompute.py        activation recomputation that replays the random streams
offload.py          activation offloading to CPU memory
wgrad.py            delayed weight gradients (zero bubble, --delay-wgrad-compute)
main_grad.py        main gradients, and gradient accumulation fused into layers
overlap.py          computation during communication: dual-batch overlap, delayed weight gradients
late_reduction.py   an all-reduce whose result comes a call late
box_hash.py         hashes of tensors, which boxes of them add up to
flight_recorder.py  the last collectives of a rank, for messages about failures
"""
