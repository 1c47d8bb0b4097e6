"""One request on its way: how far its text is known, read and stored, and what has been told."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from megatron.core.tokenizers.base import Tokenizer
from megatron.inference.blocks import Blocks
from megatron.inference.crew import Draws, Found, Row
from megatron.inference.requests import Event, Listener, Reason, Reply, Request, Token
from megatron.inference.text import Text


class Running:
    """A request and its text.

    ids: prompt and new tokens, of which the first `computed` are stored in `blocks` (and the first `drafted` by the draft).
    promised: where further blocks are hoped for. drafts: what the draft says comes next. reason: why it has ended, None before.
    """

    def __init__(self, ticket: int, request: Request, listener: Listener, tokenizer: Tokenizer, *, ends: Collection[int]) -> None:
        assert request.seed is not None, "a request that runs has a seed"
        self.ticket, self.request, self.seed, self._listener, self._ends = ticket, request, request.seed, listener, frozenset(ends)
        self.ids = list(request.prompt)
        self.copy, self.blocks, self.computed, self.drafted = 0, list[int](), 0, 0
        self.promised = range(0)
        self.drafts: tuple[int, ...] = ()
        self.reason: Reason | None = None
        self._published, self._content = 0, b""
        self._text = Text(tokenizer, request.prompt, request.stop_words, keep_stop=request.keep_stop)
        self._prompt_scores: list[Token] = []
        self._tokens: list[Token] = []
        self._told, self._unsaid, self._problem = 0, "", ""
        self._submitted, self._admitted, self._first, self._cached = time.monotonic(), None, None, 0

    @property
    def left(self) -> int:
        """Tokens that are known and not read yet; 1 when the text is decoded."""
        return len(self.ids) - self.computed

    @property
    def made(self) -> int:
        """New tokens."""
        return len(self.ids) - len(self.request.prompt)

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are still to be found."""
        return self.request.prompt_logprobs and len(self._prompt_scores) < len(self.request.prompt) - 1

    def room(self, most: int) -> int:
        """How many guesses, of so many, are worth checking in the next step: the last token needs none."""
        return max(0, min(most, self.request.num_tokens - self.made - 1)) if self.left == 1 else 0

    def draws(self, after: Sequence[tuple[int, int]]) -> Draws:
        """How the next token is picked."""
        repeats = self.request.sampling.repetition_penalty != 1.0
        return Draws(self.request.sampling, self.seed, self.request.first_draw + self.made, tuple(self.ids) if repeats else (),
                     () if self.request.newline_after_colon else tuple(after))

    def row(self, count: int, after: Sequence[tuple[int, int]]) -> Row:
        """The next `count` tokens and the draft's guesses, as the crew is asked. after: what never follows what, if lines may not
        end with a colon.
        """
        ids = tuple(self.ids[self.computed:self.computed + count])
        ends = count == self.left
        targets = tuple(self.ids[self.computed + 1:self.computed + count + 1]) if self.scores_prompt else ()
        wanted = len(ids) if targets else int(ends)
        if self.request.num_tokens == 0 and not targets:
            wanted = 0
        return Row(ids + self.drafts, self.computed, tuple(self.blocks), wanted + len(self.drafts), targets,
                   self.draws(after) if wanted > len(targets) else None, bool(targets) or ends and self.request.logprobs,
                   self.request.top_logprobs)

    def admit(self, copy: int, beginning: list[int], blocks: Blocks) -> None:
        """Begin to run, or go on, with the beginning of the text that is stored in these blocks."""
        self.copy, self.blocks = copy, beginning
        longest = blocks.needed(len(self.request.prompt) + self.request.num_tokens)
        self.promised = blocks.promise(longest - len(beginning), beginning)
        self.computed = self.drafted = len(beginning) * blocks.size
        if self._admitted is None:
            self._admitted, self._cached = time.monotonic(), self.computed

    def grow(self, blocks: Blocks) -> None:
        """Take one more block: the next that was promised, or any."""
        following = self.blocks[-1] + 1 if self.blocks else self.promised.start
        self.blocks.append(blocks.take(following) if following in self.promised else blocks.take())

    def let_go(self, blocks: Blocks) -> None:
        """Give up all blocks, and what was promised."""
        blocks.give_back(self.blocks, self.promised)
        self.blocks, self.promised = [], range(0)

    def wait_again(self, blocks: Blocks) -> None:
        """Give up what is stored."""
        self.let_go(blocks)
        self.computed, self.drafted, self.drafts = 0, 0, ()
        self._published, self._content = 0, b""
        if self.scores_prompt:
            self._prompt_scores.clear()

    def take(self, row: Row, found: Found, now: float) -> int:
        """What a step found; how many new tokens that gave."""
        count = len(row.ids) - len(self.drafts)
        drafts, self.drafts = self.drafts, ()
        self.computed += count
        told = [Token(token, *_scores(found, place)) for place, token in enumerate(found.ids)]
        self._prompt_scores += told[:len(row.targets)]
        accepted = 0
        if self.left == 0:
            if self.request.num_tokens == 0:
                self.end("length")
                return 0
            accepted = self._accept(told[len(row.targets):], drafts, now)
            self.computed += max(0, accepted - 1)
        self.drafted = min(self.drafted, self.computed)
        return accepted

    def publish(self, blocks: Blocks, stored: int) -> None:
        """Let other texts share the full blocks of the first `stored` tokens."""
        if stored // blocks.size > self._published:
            self._content = blocks.publish(self.blocks, self.ids[:stored], known=self._published, content=self._content)
            self._published = stored // blocks.size

    def end(self, reason: Reason, problem: str = "") -> None:
        """No more tokens come."""
        self.reason, self._problem = reason, problem
        self._unsaid += self._text.finish()

    def tell(self) -> None:
        """Tell the listener what is new."""
        new, text = tuple(self._tokens[self._told:]), self._unsaid
        self._told, self._unsaid = len(self._tokens), ""
        if new or text or self.reason is not None:
            self._listener(Event(self.ticket, new, text, None if self.reason is None else self._reply()))

    def _accept(self, picked: Sequence[Token], drafts: Sequence[int], now: float) -> int:
        """Append tokens as long as the draft guessed right, and one more; how many."""
        self._first = now if self._first is None else self._first
        for place, token in enumerate(picked):
            if token.id < 0:
                self.end("error", "the network's logits are not finite numbers")
                return place
            self.ids.append(token.id)
            if token.id in self._ends:
                self.end("stop")
                return place + 1
            self._tokens.append(token if self.request.logprobs else Token(token.id))
            self._unsaid += self._text.add((token.id,))
            if self._text.ended:
                self.end("stop")
            elif self.made == self.request.num_tokens:
                self.end("length")
            if self.reason is not None or place == len(drafts) or drafts[place] != token.id:
                return place + 1
        raise AssertionError("a pass picks one token more than it checks")

    def _reply(self) -> Reply:
        assert self.reason is not None, "a reply is given at the end"
        now, request = time.monotonic(), self.request
        prompt = (Token(request.prompt[0]), *self._prompt_scores) if request.prompt_logprobs else ()
        return Reply(self.reason, tuple(self._tokens), self._text.whole, prompt, self.seed, self._cached,
                     (self._admitted or now) - self._submitted, None if self._first is None else self._first - self._submitted,
                     now - self._submitted, self._problem)


def _scores(found: Found, place: int) -> tuple[float | None, tuple[tuple[int, float], ...]]:
    """(log-probability, likeliest tokens) at a place, as far as they were asked for."""
    return found.logprobs[place] if found.logprobs else None, found.top[place] if found.top else ()
