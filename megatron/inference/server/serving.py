"""What every route needs: the engine, the words, and how much one call may ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megatron.core.config.flags import ConfigError
from megatron.core.families.adapter_set import AdapterSet
from megatron.core.tokenizers.base import Tokenizer
from megatron.inference.requests import Token
from megatron.inference.server.fields import Refused
from megatron.inference.service import Service

_CONTEXT = 8  # ids in front of new ones that decide how those are written
LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot say
LEAST_TEMPERATURE = 1e-3  # below it the likeliest token is taken: logits divided by less may overflow


class ServedThread(Protocol):
    """A network in a thread of its own, as a server sees it."""

    @property
    def failure(self) -> str:
        """Why it failed; empty while it works."""

    @property
    def closing_reason(self) -> str:
        """Why no more is taken; empty while it is."""

    def drain(self, seconds: float | None = None) -> bool:
        """Take no more, and wait up to so many seconds for what runs; returns whether all has ended."""

    def stop(self) -> None:
        """Give up what runs, and wait for the thread."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one call. prompt_tokens, new_tokens: None leaves them to the engine. searches: beam searches at once, of all calls.
    read_seconds: for a body to arrive. silence_seconds: without a word in a stream, before a sign of life is sent.
    images: in a conversation. connections: at once; 900 are within the 1024 files that systems let a process open. header_seconds: for a connection to begin a call.
    """

    body_bytes: int = 2**20
    prompts: int = 128
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    searches: int = 4
    read_seconds: float = 30.0
    silence_seconds: float = 15.0
    connections: int = 900
    header_seconds: float = 10.0
    images: int = 8


@dataclass(frozen=True, slots=True)
class Serving:
    """service: the engine in its thread. model: the name that clients see. open_adapter: reads the adapter in a folder; raises
    `CheckpointError` for one of another network. updates_adapters: whether clients may load and unload them.
    """

    service: Service
    model: str
    limits: Limits = field(default_factory=Limits)
    open_adapter: Callable[[str], AdapterSet] | None = None
    updates_adapters: bool = False

    @property
    def tokenizer(self) -> Tokenizer:
        """The words of the network."""
        return self.service.engine.tokenizer

    @property
    def max_length(self) -> int:
        """The longest text."""
        return self.service.engine.max_length

    @property
    def vocab_size(self) -> int:
        """How many ids the network knows."""
        return self.service.engine.model.true_vocab_size

    @property
    def adapters(self) -> tuple[str, ...]:
        """The adapters that clients may name as a model."""
        return self.service.engine.adapters.names

    def load_adapter(self, name: str, folder: str) -> None:
        """Serve the adapter in a folder under a name. Raises `ConfigError` or `CheckpointError` for one that cannot be served, and `Stopped`."""
        if name == self.model:
            raise ConfigError(f"{name!r} is the name of the network; choose another for the adapter")
        if self.open_adapter is None:
            raise ConfigError("this server reads no adapters")
        adapters = self.open_adapter(folder)
        self.service.run_between_steps(lambda: self.service.engine.adapters.load(name, adapters))

    def adapter_named(self, model: str | None) -> str:
        """The adapter that a call's model means, "" for the network; `Refused` for a model that there is not."""
        if model in (None, self.model):
            return ""
        if model not in self.adapters:
            here = ", ".join(repr(name) for name in (self.model, *self.adapters))
            raise Refused(f"there is no model {str(model)[:100]!r} here; this server has {here}", 404)
        return str(model)

    def tokenize(self, text: str) -> list[int]:
        """The ids of a text; `Refused` if it has none of its own, as half of a surrogate pair."""
        try:
            return self.tokenizer.tokenize(text)
        except ValueError as error:
            raise Refused(f"the prompt cannot be read: {error}") from None

    def check_limits(self, prompt: Sequence[int], num_tokens: int) -> None:
        """Raise `Refused` for a prompt, or a number of new tokens, beyond the limits."""
        most, longest = self.limits.new_tokens, self.limits.prompt_tokens
        if longest is not None and len(prompt) > longest:
            raise Refused(f"the prompt has {len(prompt)} tokens; this server takes {longest}", 413)
        if most is not None and num_tokens > most:
            raise Refused(f"{num_tokens} new tokens are asked for; this server gives {most}")
        if len(prompt) + max(0, num_tokens - 1) > self.max_length:
            raise Refused(
                f"a prompt of {len(prompt)} tokens and {num_tokens} new ones are more than the {self.max_length} positions of the "
                "network; shorten the prompt or ask for fewer"
            )


class TokenTexts:
    """The text of each id of a text, as it grows. ids: what stands before.

    An id that ends in the middle of a character has no text, and the one that completes the character has all of it.
    """

    def __init__(self, tokenizer: Tokenizer, ids: Sequence[int] = ()) -> None:
        self._tokenizer, self._ids = tokenizer, list(ids[-_CONTEXT:])
        self._said = len(tokenizer.detokenize(self._ids))

    def add(self, ids: Sequence[int], *, last: bool) -> list[str]:
        """The texts of the ids that come next. last: no more come, so that half a character is all there will be of it."""
        pieces = []
        for place, token in enumerate(ids, start=1):
            self._ids.append(token)
            text = self._tokenizer.detokenize(self._ids)
            whole = not text.endswith("\ufffd") or last and place == len(ids)
            pieces.append(text[self._said :] if whole else text[self._said : -1])
            self._said += len(pieces[-1])
            if whole and len(self._ids) > 2 * _CONTEXT:
                self._ids = self._ids[-_CONTEXT:]
                self._said = len(self._tokenizer.detokenize(self._ids))
        return pieces


def json_logprob(token: Token) -> float | None:
    """A token's log-probability as JSON can say it."""
    return None if token.logprob is None else max(token.logprob, LEAST_LOGPROB)


def effective_temperature(temperature: float) -> float:
    """The temperature that is drawn with."""
    return 0.0 if temperature < LEAST_TEMPERATURE else float(temperature)
