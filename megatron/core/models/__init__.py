"""Network architectures, built one pipeline stage at a time.

parameter_names.py  parameter names that several files use
stage_model.py      what the networks have in common: a stage is built on the meta device, then gets values
embedding.py        embeddings of ids, positions and token types
output_heads.py     the output layer and its loss, BERT's heads
gpt.py              decoder-only transformers
vision_language.py  decoders that read images
decoders.py         decoders that score texts; which of these classes a decoder has
mtp.py              multi-token prediction
bert.py             encoders with a masked-language-model head, or one for classes
t5.py               encoder-decoder transformers
memory_layer.py     their decoder's layers, with cross attention
vision.py           vision transformers, and how a language model takes in what they see
describe.py         names, shapes and counts of parameters, from the network on the meta device
on_meta.py          networks on the meta device
flops.py            FLOPs and memory from the config
gradient_flow.py    which matrix products a step computes where parameters are frozen
"""
