"""Adapters (LoRA, rsLoRA, DoRA, QLoRA) beside the core: their files, and many of them beside one served network.

files.py         adapters in memory, and a network with adapters merged into its weights
peft.py          adapters in PEFT's folders
peft_config.py   their settings
peft_mapping.py  names of matrices
peft_factors.py  their factors as ours
peft_saved.py    parameters that they hold whole
peft_export.py   the way back
serving.py       adapters of several requests beside one base, in one pass
"""
