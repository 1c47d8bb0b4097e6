"""A small tokenizer.json with a BOS before every text, marks of ChatML and a chat template, for this project and for transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TEXTS = Path(__file__).resolve().parents[2] / "examples" / "data" / "demo_valid.jsonl"
CHATML = (
    "{{ bos_token }}{% if tools %}{{ '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% if no_thoughts %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
# As Qwen3's: thoughts of earlier answers are left out when a question follows.
STRIPS_THOUGHTS = (
    "{{ bos_token }}{% for m in messages %}{% set text = m.content %}"
    "{% if m.role == 'assistant' and not loop.last and '</think>' in text %}{% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_chat_tokenizer(folder: Path, template: str = CHATML) -> Any:
    """Write the tokenizer's files into a folder; return transformers' tokenizer of them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|pad|>"],
        show_progress=False,
    )
    made.train_from_iterator(
        [json.loads(line)["text"] for line in TEXTS.read_text().split("\n")[:200] if line], trainer
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="<|im_end|>", pad_token="<|pad|>", chat_template=template
    )
    theirs.save_pretrained(folder)
    return theirs
