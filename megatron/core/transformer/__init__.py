"""What a layer is made of.

context/                  what every layer's constructor and forward pass receive
adapters.py               adapters beside linear layers and those of experts: LoRA, rsLoRA, DoRA
dropout.py                dropout from a named random stream
mixers/                   attention, latent attention, Mamba-2 and the gated delta net
relative.py               T5's relative positions
mlp.py                    dense and gated MLP
router.py                 which experts each token uses, and what keeps the choice even
dispatch.py               tokens to their experts, and back
moe.py                    experts as grouped matmuls, shared experts, and the layer of both
sublayers.py              which mixer and which MLP a LayerPlan names, and both with fixed factors
blocks.py                 Block: a layer; a class for each order of norms, sublayers and sums
stack.py                  the layers of one stage, and their recomputation
activation_offloading.py  which parts of a stage send their activations to the CPU
"""
