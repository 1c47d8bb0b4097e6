"""Questions about pictures of one coloured shape each (easy-vqa), and drawn pictures of two, as pretrain_vlm.py and the others read them.

OUT/tokenizer/             a vocabulary of the words that occur, with a template of conversations
OUT/classes/red circle/    pictures by what they show, for pretrain_vision_classify.py
OUT/text.jsonl             the conversations without pictures, for pretrain_gpt.py --sft
OUT/train.json             LLaVA's JSON: a picture, a question and its answer
OUT/test.jsonl             a question with its picture a line, for `megatron generate`;  OUT/shuffled.jsonl: with another picture
OUT/drawn/0.png            a drawn picture of two shapes;  OUT/captions.json: captions of these and of the others, for training
OUT/captions.jsonl         drawn pictures to describe, OUT/captions_shuffled.jsonl with other pictures, OUT/references.jsonl: captions that are right
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers

END = "<|endoftext|>"
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content + ' ' }}{% endif %}{% endfor %}"
)
COLOURS = {"red": "#d82020", "green": "#20a020", "blue": "#2040e0", "yellow": "#e8d010", "black": "#101010"}
DRAWN = ("circle", "rectangle", "triangle")
SIDE = 64
Questions = dict[int, list[tuple[str, str]]]  # picture -> (question, answer) pairs


def questions(folder: Path) -> Questions:
    """The questions about each picture of a split."""
    result: Questions = defaultdict(list)
    for question, answer, picture in json.loads((folder / "questions.json").read_text()):
        result[picture].append((question.replace("?", " ?"), answer))
    return result


def write_tokenizer(out: Path, texts: Iterable[str]) -> None:
    """One id a word, and one that ends an answer."""
    words = sorted({word for text in texts for word in text.split()})
    vocabulary = {word: number for number, word in enumerate([END, "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([END])
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {"eos_token": END, "chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (out / "tokenizer_config.json").write_text(json.dumps(config))


def shown(data: Questions) -> dict[int, tuple[str, str]]:
    """Colour and shape of the pictures whose questions tell both."""
    answers = {answer for pairs in data.values() for _, answer in pairs} - {"yes", "no"}
    result = {}
    for picture, pairs in data.items():
        words = {answer for _, answer in pairs} & answers
        kinds, colours = words & set(DRAWN), words - set(DRAWN)
        if len(kinds) == len(colours) == 1:
            result[picture] = colours.pop(), kinds.pop()
    return result


def write_classes(out: Path, images: Path, classes: dict[int, tuple[str, str]]) -> None:
    """Pictures in folders by colour and shape."""
    for picture, (colour, kind) in classes.items():
        folder = out / f"{kind} {colour}"
        folder.mkdir(parents=True, exist_ok=True)
        os.symlink(images / f"{picture}.png", folder / f"{picture}.png")


def conversation(picture: str, question: str, answer: str) -> dict[str, object]:
    """A row of LLaVA's JSON."""
    turns = [{"from": "human", "value": f"<image> {question}"}, {"from": "gpt", "value": answer}]
    return {"image": picture, "conversations": turns}


def write_training(out: Path, data: Questions) -> None:
    """A conversation for each question, without its picture and with it."""
    every = [(picture, *pair) for picture, pairs in data.items() for pair in pairs]
    random.shuffle(every)
    with open(out / "text.jsonl", "w") as file:
        for _, question, answer in every:
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
    rows = [conversation(f"{picture}.png", question, answer) for picture, question, answer in every]
    (out / "train.json").write_text(json.dumps(rows))


def draw(path: Path) -> list[str]:
    """Draw two shapes beside or above each other. Returns captions that are right, first the one to be learnt."""
    beside = random.random() < 0.5
    colours, kinds = random.sample(sorted(COLOURS), 2), [random.choice(DRAWN) for _ in range(2)]
    picture = Image.new("RGB", (SIDE, SIDE), "white")
    pen = ImageDraw.Draw(picture)
    for place, (colour, kind) in enumerate(zip(colours, kinds, strict=True)):
        size, jitter = random.randint(20, 28), random.randint(0, 4)
        left, top = (
            (2 + 32 * place + jitter, random.randint(4, 32)) if beside else (random.randint(4, 32), 2 + 32 * place)
        )
        box = (left, top, min(left + size, SIDE - 1), min(top + size, SIDE - 1))
        if kind == "triangle":
            pen.polygon([(box[0], box[3]), (box[2], box[3]), ((box[0] + box[2]) // 2, box[1])], fill=COLOURS[colour])
        else:
            (pen.ellipse if kind == "circle" else pen.rectangle)(box, fill=COLOURS[colour])
    picture.save(path)
    first, second = (f"a {colour} {kind}" for colour, kind in zip(colours, kinds, strict=True))
    words = ("left of", "right of") if beside else ("above", "below")
    return [f"{first} {words[0]} {second}", f"{second} {words[1]} {first}", f"{first} and {second}"]


def write_captions(out: Path, classes: dict[int, tuple[str, str]], training: int, most: int) -> list[str]:
    """Pictures with a caption each, those of one shape too. Returns the captions that are learnt."""
    (out / "drawn").mkdir(parents=True)
    captions = [draw(out / "drawn" / f"{number}.png") for number in range(training + most)]
    question = "describe the picture"
    described = {f"{picture}.png": f"a {colour} {kind}" for picture, (colour, kind) in classes.items()}
    described |= {str(out / "drawn" / f"{number}.png"): one[0] for number, one in enumerate(captions[:training])}
    rows = [conversation(picture, question, caption) for picture, caption in described.items()]
    random.shuffle(rows)
    (out / "captions.json").write_text(json.dumps(rows))
    tested = range(training, training + most)
    for name, pictures in (("captions", tested), ("captions_shuffled", [*tested[1:], tested[0]])):
        with open(out / f"{name}.jsonl", "w") as file:
            for number, picture in zip(tested, pictures, strict=True):
                messages = [{"role": "user", "content": f"<image> {question}"}]
                row = {"id": number, "messages": messages, "images": [str(out / "drawn" / f"{picture}.png")]}
                file.write(json.dumps(row) + "\n")
    lines = [json.dumps({"id": number, "references": captions[number]}) + "\n" for number in tested]
    (out / "references.jsonl").write_text("".join(lines))
    return [question, *(one[0] for one in captions)]


def write_test(out: Path, images: Path, data: Questions, most: int) -> None:
    """Some questions of pictures that were not trained on, with their own picture and with another."""
    every = [(picture, *pair) for picture, pairs in data.items() for pair in pairs]
    chosen = random.sample(every, most)
    others = random.sample(chosen, most)
    for name, pictures in (("test", chosen), ("shuffled", others)):
        with open(out / f"{name}.jsonl", "w") as file:
            for number, ((_, question, answer), (picture, *_)) in enumerate(zip(chosen, pictures, strict=True)):
                row = {
                    "id": number,
                    "messages": [{"role": "user", "content": f"<image> {question}"}],
                    "images": [str(images / f"{picture}.png")],
                    "references": [answer],
                }
                file.write(json.dumps(row) + "\n")
    with open(out / "blind.jsonl", "w") as file:
        for number, (_, question, _) in enumerate(chosen):
            file.write(json.dumps({"id": number, "prompt": f"{question} "}) + "\n")


def main() -> None:
    """Write everything into the folder that is named: OUT, questions of the test, drawn pictures to learn captions of."""
    out, most, drawn = Path(sys.argv[1]).resolve(), int(sys.argv[2]), int(sys.argv[3])
    package = importlib.util.find_spec("easy_vqa")
    if package is None or package.origin is None:
        raise SystemExit("the questions come with the package easy-vqa; pip install easy-vqa")
    data = Path(package.origin).parent / "data"
    random.seed(0)
    train, test = questions(data / "train"), questions(data / "test")
    classes = shown(train)
    write_classes(out / "classes", data / "train" / "images", classes)
    write_training(out, train)
    write_test(out, data / "test" / "images", test, most)
    captions = write_captions(out, classes, drawn, 200) if drawn else []
    asked = [text for pairs in train.values() for pair in pairs for text in pair]
    write_tokenizer(out / "tokenizer", [*asked, *captions])
    print(data / "train" / "images")


if __name__ == "__main__":
    main()
