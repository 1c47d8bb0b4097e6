"""Adapters (LoRA, rsLoRA, DoRA, QLoRA) beside the core: their base, their files, and many beside one served network.

files.py         adapters in memory, and a network with adapters merged into its weights
peft.py          adapters in PEFT's folders
peft_config.py   their settings
peft_mapping.py  names of matrices
peft_factors.py  their factors as ours
peft_export.py   the way back
serving.py       adapters of several requests beside one base, in one pass
quantized_base.py  the network under adapters: frozen, in 4 or 8 bits, and able to compute alone
saved.py         checkpoints of runs with adapters, and the hash of the base that they belong to
"""
