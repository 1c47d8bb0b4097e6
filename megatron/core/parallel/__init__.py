"""What every kind of parallelism is built on: the mesh, collectives, and what each rank holds of a tensor.

grid.py         which ranks share which axis: pure arithmetic
mesh.py         Axis and Mesh: this rank's place and its groups
device.py       the few calls that differ between CPU and GPU
collectives.py  collectives, and their gradients as forward/backward pairs
boxes.py        rectangles inside global tensors
spec.py         the one record a parameter carries, and what follows from it
rng.py          named random streams; initial values drawn by global name
recompute.py    activation recomputation that replays the random streams
offload.py      activation offloading to CPU memory
wgrad.py        delayed weight gradients (zero bubble, --delay-wgrad-compute)
main_grad.py    main gradients, and the accumulation that layers do themselves
overlap.py      computation during waits: dual-batch overlap, delayed weight gradients
flight_recorder.py  the last collectives of a rank, for messages about failures
"""
