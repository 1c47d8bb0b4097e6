"""The network as rows, derived from the settings.

pattern.py     what the symbols of a layer pattern mean
layers.py      one row per layer, and which layers each pipeline stage builds
linear_layers.py  names and sizes of the linear layers of a layer
stages.py      the pipeline stages of a run
network.py     the settings that make a network's function, and those and operations with kernels, that a network does not use
"""
