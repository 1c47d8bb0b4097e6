"""What each kind of sequence mixer needs and costs, without torch; its module is in `transformer/mixers`.

mixer.py            Mixer: what one answers for itself
attention.py        self attention with grouped heads
mla.py              self attention by latents of keys and values
recurrent.py        what mixers with a state in the place of keys and values have in common
mamba.py            Mamba-2
gated_delta_net.py  the gated delta net
table.py            MIXERS: all of them by name, and which a network has
"""
