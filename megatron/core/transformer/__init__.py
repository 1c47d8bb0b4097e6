"""Floor 4: what a layer is made of.

build.py      Build: what every layer constructor receives
rope.py       rotary tables
passing.py    what goes through the layers beside the hidden states
dropout.py    dropout from a named random stream
attention.py  self attention with grouped heads
cross_attention.py  attention to what an encoder made
relative.py   T5's relative positions
mlp.py        dense and gated MLP
layer.py      Layer: what a LayerPlan says, in order
stack.py      the layers of one stage, and their recomputation
"""
