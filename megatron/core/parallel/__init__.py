"""Floor 2: the ground of every parallelism. Who sits where, and who holds what.

grid.py         which ranks share which axis: pure arithmetic
mesh.py         Axis and Mesh: this rank's place and its groups
device.py       the few calls that differ between CPU and GPU
collectives.py  collectives, and their gradients as forward/backward pairs
boxes.py        rectangles inside global tensors
spec.py         the one record a parameter carries, and what follows from it
rng.py          named random streams; initial values drawn by global name
recompute.py    activation recomputation that replays the random streams
offload.py      activations that wait in the memory of the CPU
deferred.py     gradients of weights that wait for their turn in the schedule
turns.py        two pieces of work in turns, each while the other waits for other ranks
"""
