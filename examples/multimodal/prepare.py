"""Questions about pictures of one coloured shape each (easy-vqa), as pretrain_vlm.py and the other programs of this example read them.

OUT/tokenizer/             a vocabulary of the words that occur, with a template of conversations
OUT/classes/red circle/    pictures by what they show, for pretrain_vision_classify.py
OUT/text.jsonl             the conversations without pictures, for pretrain_gpt.py --sft
OUT/train.json             LLaVA's JSON: a picture, a question and its answer
OUT/test.jsonl             a question with its picture a line, for tools/generate.py;  OUT/shuffled.jsonl: with another picture
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import sys
from collections import defaultdict
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

END = "<|endoftext|>"
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content + ' ' }}{% endif %}{% endfor %}"
)
Questions = dict[int, list[tuple[str, str]]]  # picture -> (question, answer) pairs


def questions(folder: Path) -> Questions:
    """The questions about each picture of a split."""
    result: Questions = defaultdict(list)
    for question, answer, picture in json.loads((folder / "questions.json").read_text()):
        result[picture].append((question.replace("?", " ?"), answer))
    return result


def write_tokenizer(out: Path, data: Questions) -> None:
    """One id a word, and one that ends an answer."""
    words = sorted({word for pairs in data.values() for pair in pairs for text in pair for word in text.split()})
    vocabulary = {word: number for number, word in enumerate([END, "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([END])
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {"eos_token": END, "chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (out / "tokenizer_config.json").write_text(json.dumps(config))


def write_classes(out: Path, images: Path, data: Questions) -> None:
    """Pictures in folders by colour and shape, as far as their questions tell both."""
    shapes = {"circle", "rectangle", "triangle"}
    answers = {answer for pairs in data.values() for _, answer in pairs} - {"yes", "no"}
    for picture, pairs in data.items():
        said = {answer for _, answer in pairs} & answers
        kinds, colours = said & shapes, said - shapes
        if len(kinds) == len(colours) == 1:
            folder = out / f"{kinds.pop()} {colours.pop()}"
            folder.mkdir(parents=True, exist_ok=True)
            os.symlink(images / f"{picture}.png", folder / f"{picture}.png")


def write_training(out: Path, data: Questions) -> None:
    """A conversation a question, with its picture and without it."""
    every = [(picture, *pair) for picture, pairs in data.items() for pair in pairs]
    random.shuffle(every)
    rows = []
    with open(out / "text.jsonl", "w") as file:
        for picture, question, answer in every:
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
            turns = [{"from": "human", "value": f"<image> {question}"}, {"from": "gpt", "value": answer}]
            rows.append({"image": f"{picture}.png", "conversations": turns})
    (out / "train.json").write_text(json.dumps(rows))


def write_test(out: Path, images: Path, data: Questions, most: int) -> None:
    """Some questions of pictures that were not trained on, with their own picture and with another."""
    every = [(picture, *pair) for picture, pairs in data.items() for pair in pairs]
    chosen = random.sample(every, most)
    others = random.sample(chosen, most)
    for name, pictures in (("test", chosen), ("shuffled", others)):
        with open(out / f"{name}.jsonl", "w") as file:
            for (_, question, answer), (picture, *_) in zip(chosen, pictures, strict=True):
                row = {
                    "id": answer,
                    "messages": [{"role": "user", "content": f"<image> {question}"}],
                    "images": [str(images / f"{picture}.png")],
                }
                file.write(json.dumps(row) + "\n")
    with open(out / "blind.jsonl", "w") as file:
        for _, question, answer in chosen:
            file.write(json.dumps({"id": answer, "prompt": f"{question} "}) + "\n")


def main() -> None:
    """Write everything into the folder that is named."""
    out, most = Path(sys.argv[1]).resolve(), int(sys.argv[2])
    package = importlib.util.find_spec("easy_vqa")
    if package is None or package.origin is None:
        raise SystemExit("the questions come with the package easy-vqa; pip install easy-vqa")
    data = Path(package.origin).parent / "data"
    random.seed(0)
    train, test = questions(data / "train"), questions(data / "test")
    write_tokenizer(out / "tokenizer", train)
    write_classes(out / "classes", data / "train" / "images", train)
    write_training(out, train)
    write_test(out, data / "test" / "images", test, most)
    print(data / "train" / "images")


if __name__ == "__main__":
    main()
