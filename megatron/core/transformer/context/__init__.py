"""What goes into every layer: into its constructor, and into its forward pass beside the hidden states.

layer_build_context.py  LayerBuildContext: what every layer constructor receives
forward_context.py      ForwardContext: one microbatch's masks and tables
rope.py                 rotary tables
cache.py                what decoding puts between the layers of a stage and their attention
"""
