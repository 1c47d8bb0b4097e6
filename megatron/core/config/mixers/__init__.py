"""What each kind of sequence mixer needs, without torch; its module is in `transformer/mixers`.

mamba.py            Mamba-2
gated_delta_net.py  the gated delta net
"""
