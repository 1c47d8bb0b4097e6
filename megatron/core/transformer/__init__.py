"""What a layer is made of.

layer_build_context.py    Build: what every layer constructor receives
rope.py                   rotary tables
forward_context.py        what goes through the layers beside the hidden states
dropout.py                dropout from a named random stream
attention.py              self attention with grouped heads
qk_clip.py                weights of queries and keys shrink where scores grew too large
mla.py                    self attention by latents of keys and values
cross_attention.py        attention to what an encoder made
relative.py               T5's relative positions
mlp.py                    dense and gated MLP
router.py                 which experts each token uses
expert_balance.py         what keeps the choice of experts even
dispatch.py               tokens to their experts, and back
moe.py                    experts as grouped matmuls, shared experts, and the layer of both
layer.py                  Layer: what a LayerPlan says, in order
stack.py                  the layers of one stage, and their recomputation
activation_offloading.py  which parts of a stage send their activations to the CPU
"""
