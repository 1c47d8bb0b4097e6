"""What mixes the positions of a sequence, one kind a file: the first half of a layer.

attention.py        self attention with grouped heads
mla.py              self attention by latents of keys and values
mamba.py            Mamba-2, a selective state space
qk_clip.py          weights of queries and keys shrink where scores grew too large
gated_delta_net.py  the gated delta net, a state of keys and values
state_space.py      what the last two have in common: the convolution, and the state of decoding
"""
