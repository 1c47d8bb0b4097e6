"""Published weights: settings and names, no ranks.

parameter_mapping.py  Family, and mappings of parameters that run both ways
config_json.py        the keys of a config.json
gpt2.py               GPT-2
llama.py              Llama 2 and 3, SmolLM2, Mistral
mixtral.py            Mixtral, and what all with experts share
qwen.py               Qwen 2, 2.5 and 3, with experts and without
deepseek.py           DeepSeek-V2 and V3
gpt_oss.py            gpt-oss
gemma.py              Gemma 1, 2 and 3
olmo.py               OLMo 2
qwen_next.py          Qwen3-Next, and the language models of Qwen3.5
bamba.py              Bamba and Falcon-H1
nemotron_h.py         Mamba-2 and Nemotron-H
vision.py             encoders of images: CLIP, SigLIP, InternViT, DINOv2, ViT
llava.py              language models that see: LLaVA, InternVL, SmolVLM
bert.py               BERT, and BERT as Megatron builds it
t5.py                 T5 v1.0, v1.1 and Flan
registry.py           the families that are known, and which of them can say what a network is
dequantize.py         tensors that files hold in 4 bits, in 8 bits, or many in one
tensor_file.py        safetensors files, a tensor at a time
hf_folder.py          how a Hugging Face folder is recognized
hf.py                 Hugging Face folders: a Source of our names, and the way back
hf_export.py          a Hugging Face folder, written a tensor at a time
tokenizer_files.py    which tokenizer a folder's files make
image_processor.py    how a folder's images become tiles
"""
