"""What an environment says, as ids: one text as the tokenizer reads it, messages as transformers' chat template writes them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import ByteTokenizer, build_tokenizer
from megatron.core.tokenizers.huggingface import HuggingFaceTokenizer
from megatron.inference.requests import GenerationReply, GenerationRequest, TokenLogprob
from megatron.inference.sampling import SamplingParams
from megatron.rl.environments.config import read_environments, refuse_missing_chat_template
from megatron.rl.environments.openai_agent import chatml_prompt
from megatron.rl.rollouts import RolloutLimits, _RolloutConversation
from tests.helpers.chat_templates import KINDS, save_tokenizer
from tests.helpers.chat_tokenizer import STRIPS_THOUGHTS, write_chat_tokenizer

pytest.importorskip("transformers", reason="transformers is not installed")
LLAMA = Path(__file__).resolve().parents[3] / "examples" / "data" / "demo-llama.model"
QUESTION = {"role": "user", "content": "Is it far?"}


class Policy:
    """Answers with given texts; the end of an answer is sampled too, unless it is cut off."""

    def __init__(self, tokenizer: Tokenizer, *answers: str, cut_off: bool = False, **options: Any) -> None:
        self.tokenizer, self.answers, self.cut_off = tokenizer, list(answers), cut_off
        self.requests: list[GenerationRequest] = []
        limits = RolloutLimits(SamplingParams(), 2000, 500)
        self.conversation = _RolloutConversation(tokenizer, limits, 0, 0, self.submit, [], **options)

    def submit(self, request: GenerationRequest) -> Any:
        """The next answer, at once."""
        self.requests.append(request)
        text, end = self.answers.pop(0), request.stop_ids[0] if request.stop_ids else self.tokenizer.eod
        words = "" if self.cut_off or request.stop_ids else next(iter(request.stop_words), "")
        ids = self.tokenizer.tokenize_with_special(text + words)
        tokens = tuple(TokenLogprob(token, -1.0) for token in ids)
        ended = None if self.cut_off or words else TokenLogprob(end, -1.0)
        future = asyncio.get_running_loop().create_future()
        future.set_result(GenerationReply("length" if self.cut_off else "stop", tokens, text=text + words, end=ended))
        return future

    def play(self, *said: Any) -> _RolloutConversation:
        """Add texts, or lists of messages, each with an answer after it if there is one left."""

        async def play_all() -> None:
            for one in said:
                add = self.conversation.add if isinstance(one, str) else self.conversation.add_messages
                add(one)
                if self.answers:
                    await self.conversation.generate()

        asyncio.run(play_all())
        return self.conversation


def ids_added(conversation: _RolloutConversation) -> list[int]:
    """The ids that are not learnt."""
    return [one for one, known in zip(conversation.ids, conversation.sampled, strict=True) if not known]


def test_a_text_begins_once_and_is_one_text_however_many_pieces_it_comes_in(tmp_path: Path) -> None:
    theirs = write_chat_tokenizer(tmp_path)
    tokenizer = HuggingFaceTokenizer(tmp_path)
    for pieces in (["Hi there", " wrong, again:"], ["the pres", "ident of"], ["<s>Hi", "<|im_", "end|> there"]):
        text = "".join(pieces)
        conversation = Policy(tokenizer).play(*pieces)
        assert conversation.ids == theirs(text.removeprefix("<s>"))["input_ids"] and conversation.prompt == text
    assert Policy(tokenizer).play(chatml_prompt([QUESTION])).ids == theirs.apply_chat_template(
        [QUESTION], add_generation_prompt=True, return_dict=False
    )


@pytest.mark.parametrize("kind", ["Llama2Tokenizer", "GPTSentencePieceTokenizer"])
def test_sentencepiece_puts_no_space_into_a_conversation(kind: str) -> None:
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=str(LLAMA)))
    assert Policy(tokenizer).play("the pres", "ident of").ids == tokenizer.tokenize("the president of")
    policy = Policy(tokenizer, "It is", cut_off=True)
    conversation = policy.play("Say: ", "land, he said")
    assert tokenizer.detokenize(ids_added(conversation)[len(policy.requests[0].prompt) :]) == "land, he said"
    assert conversation.ids.count(1) == (kind == "Llama2Tokenizer")


@pytest.mark.parametrize("cut_off", [False, True])
def test_messages_are_those_of_transformers_and_answers_keep_their_ids(tmp_path: Path, cut_off: bool) -> None:
    theirs = write_chat_tokenizer(tmp_path)
    tokenizer = HuggingFaceTokenizer(tmp_path)
    policy = Policy(tokenizer, "No.", "Yes, <s> very", cut_off=cut_off, prompt_format="tokenizer")
    conversation = policy.play("Is it <|im_end|> near?", "And far?", "So?")
    first = [{"role": "user", "content": "Is it near?"}]
    assert len(policy.requests[0].prompt) > len(
        theirs.apply_chat_template(first, add_generation_prompt=True, return_dict=False)
    ), "a mark in a message stays text"
    policy = Policy(tokenizer, "No.", "Yes, very", cut_off=cut_off)
    conversation = policy.play([*first], [QUESTION], [{"role": "user", "content": "So?"}])
    whole = [*first, {"role": "assistant", "content": "No."}, QUESTION]
    whole += [{"role": "assistant", "content": "Yes, very"}, {"role": "user", "content": "So?"}]
    expected = theirs.apply_chat_template(whole, add_generation_prompt=True, return_dict=False)
    assert conversation.ids == expected, "where the answers are tokenized as they were sampled"
    end = [] if cut_off else [tokenizer.eod]
    learnt = [*tokenizer.tokenize_with_special("No."), *end, *tokenizer.tokenize_with_special("Yes, very"), *end]
    assert [one for one, known in zip(conversation.ids, conversation.sampled, strict=True) if known] == learnt
    assert policy.requests[0].stop_ids == (tokenizer.eod,) and conversation.messages == whole
    policy = Policy(tokenizer, "No.", cut_off=cut_off)
    more = [QUESTION, {"role": "assistant", "content": "as an example: far"}, {"role": "user", "content": "So?"}]
    expected = theirs.apply_chat_template(
        [*first, {"role": "assistant", "content": "No."}, *more], add_generation_prompt=True, return_dict=False
    )
    assert policy.play(first, more).ids == expected, "an answer that the policy did not give"


def test_a_template_that_rewrites_earlier_answers_does_not_change_what_was_sampled(tmp_path: Path) -> None:
    write_chat_tokenizer(tmp_path, STRIPS_THOUGHTS)
    tokenizer = HuggingFaceTokenizer(tmp_path)
    thought = "<think>\nhm\n</think>\n\nyes"
    policy = Policy(tokenizer, thought, "no", prompt_format="tokenizer")
    conversation = policy.play("Is it near?", "Is it far?")
    text = tokenizer.detokenize(conversation.ids)
    assert text == (
        f"<s><|im_start|>user\nIs it near?<|im_end|>\n<|im_start|>assistant\n{thought}<|im_end|>\n"
        "<|im_start|>user\nIs it far?<|im_end|>\n<|im_start|>assistant\nno<|im_end|>"
    )
    known = [one for one, learnt in zip(conversation.ids, conversation.sampled, strict=True) if learnt]
    assert tokenizer.detokenize(known) == f"{thought}<|im_end|>no<|im_end|>"
    assert tuple(conversation.ids[: len(policy.requests[1].prompt)]) == policy.requests[1].prompt


@pytest.mark.parametrize("template", ["chatml", "llama2", "llama3", "mistral", "plain"])
def test_formats_whose_marks_a_vocabulary_lacks_end_answers_by_words(template: str) -> None:
    tokenizer = ByteTokenizer()
    conversation = Policy(tokenizer, "No.", "Yes.", prompt_format=template).play("Near?", "Far?")
    assert [one["content"] for one in conversation.messages] == ["Near?", "No.", "Far?", "Yes."]
    text = tokenizer.detokenize([one for one in conversation.ids if one != tokenizer.eod])
    assert text.count("No.") == text.count("Far?") == 1 and (template != "chatml" or "<|im_end|><|im_end|>" not in text)


def test_a_rollout_is_of_text_or_of_messages(tmp_path: Path) -> None:
    write_chat_tokenizer(tmp_path)
    tokenizer = HuggingFaceTokenizer(tmp_path)
    with pytest.raises(ValueError, match="give the environment a prompt_format"):
        Policy(tokenizer).conversation.add("Be brief.", role="system")
    with pytest.raises(ValueError, match="this one has begun with text"):
        Policy(tokenizer).play("Hi", [QUESTION])
    policy = Policy(tokenizer, prompt_format="chatml")
    policy.conversation.add("Be brief.", role="system")
    policy.conversation.add("Hi")
    assert tokenizer.detokenize(policy.conversation.ids).count("<|im_start|>") == 3


def test_an_environment_file_names_the_prompt_format(tmp_path: Path) -> None:
    file = tmp_path / "e.yaml"
    file.write_text("- agent_type: arithmetic\n  prompt_format: tokenizer\n")
    (one,) = read_environments(str(file))
    assert one.prompt_format == "tokenizer"
    with pytest.raises(ConfigError, match="asks by the tokenizer's chat template, and it has none"):
        refuse_missing_chat_template([one], ByteTokenizer())
    file.write_text("- agent_type: arithmetic\n  prompt_format: vicuna\n")
    with pytest.raises(ConfigError, match="prompt_format 'vicuna' is none of tokenizer, chatml"):
        read_environments(str(file))


def test_an_answer_may_end_with_a_token_that_is_not_special(tmp_path: Path) -> None:
    theirs = write_chat_tokenizer(tmp_path)
    parsed = json.loads((tmp_path / "tokenizer.json").read_text())
    parsed["added_tokens"] = [{**one, "special": "im_" not in one["content"]} for one in parsed["added_tokens"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(parsed))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "chat_template": theirs.chat_template})
    )
    tokenizer = HuggingFaceTokenizer(tmp_path)
    conversation = Policy(tokenizer, "No.", prompt_format="tokenizer").play("Near?", "Far?")
    turns = [("user", "Near?"), ("assistant", "No."), ("user", "Far?")]
    expected = [{"role": role, "content": content} for role, content in turns]
    assert conversation.ids == theirs.apply_chat_template(expected, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize(
    "end, template",
    [
        # As Cohere's: an answer ends with two marks, and the policy writes both.
        ("<|said|>", "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% if m.role == 'assistant' %}{{ '<|said|>' }}{% endif %}{{ '<|eot|>' }}{% endfor %}"),
        ("", KINDS["ends once"]),  # As Phi-3's: marks take the new line behind them.
    ],
    ids=["two marks", "marks that take space"],
)  # fmt: skip
def test_the_end_of_an_answer_is_there_once_as_in_transformers(end: str, template: str, tmp_path: Path) -> None:
    invite = "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}{# <|user|> <|assistant|> #}" if end else ""
    theirs = save_tokenizer(tmp_path, template + invite)
    conversation = Policy(HuggingFaceTokenizer(tmp_path), f"No.{end}", prompt_format="tokenizer").play("Near?", "Far?")
    turns = [("user", "Near?"), ("assistant", "No."), ("user", "Far?")]
    expected = [{"role": role, "content": content} for role, content in turns]
    assert conversation.ids == theirs.apply_chat_template(expected, add_generation_prompt=True, return_dict=False)
