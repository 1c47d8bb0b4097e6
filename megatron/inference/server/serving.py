"""What every route needs: the engine, the words, and how much one call may ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron.adapters.files import LoadedAdapter
from megatron.core.config.flags.declare import ConfigError
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.tokenizers.generation_config import GenerationDefaults
from megatron.inference.engine import Engine
from megatron.inference.requests import TokenLogprob
from megatron.inference.server.body_fields import RequestRefused
from megatron.inference.service import EngineService

LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot say
LEAST_TEMPERATURE = 1e-3  # below it the likeliest token is taken: logits divided by less may overflow


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of the server, most of them of one request. prompt_tokens, new_tokens: None leaves them to the engine.
    searches: beam searches at once, of all requests. read_seconds: for a body to arrive. silence_seconds: without an
    event in a stream, before a keepalive is sent. images: in a conversation. connections: at once; 900 are within the
    1024 files that systems let a process open. header_seconds: for a connection to begin a request. write_seconds: within
    which a client must read something of what it is sent.
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
    write_seconds: float = 30.0
    images: int = 8


@dataclass(frozen=True, slots=True)
class GenerationServing:
    """What the generation routes need. service: the engine in its thread. model: the name that clients see.
    open_adapter: reads the adapter in a folder; raises `CheckpointError` for one of another network. updates_adapters:
    whether clients may load and unload them. defaults: of what a call to OpenAI's paths leaves out.
    """

    service: EngineService
    model: str
    limits: RequestLimits = field(default_factory=RequestLimits)
    open_adapter: Callable[[str], LoadedAdapter] | None = None
    updates_adapters: bool = False
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)

    @property
    def engine(self) -> Engine:
        """The engine that the service runs."""
        return self.service.engine

    def load_adapter(self, name: str, folder: str) -> None:
        """Load a folder's adapter under a name. `ConfigError`, `CheckpointError` or `ServiceStoppedError` if it fails.

        The folder may hold anything; whatever reading it raises concerns this call alone.
        """
        if name == self.model:
            raise ConfigError(f"{name!r} is the name of the network; choose another for the adapter")
        if self.open_adapter is None:
            raise ConfigError("this server reads no adapters")
        try:
            adapters = self.open_adapter(folder)
        except (ConfigError, CheckpointError):
            raise
        except Exception as error:
            raise CheckpointError(f"{folder} cannot be read: {type(error).__name__}: {error}") from error
        self.service.run_between_steps(lambda: self.engine.adapters.load(name, adapters))

    def adapter_named(self, model: str | None) -> str:
        """Return the adapter that a request's model names, "" for the network; `RequestRefused` (404) if there is none."""
        if model in (None, self.model):
            return ""
        if model not in self.engine.adapters.names:
            here = ", ".join(repr(name) for name in (self.model, *self.engine.adapters.names))
            raise RequestRefused(f"there is no model {str(model)[:100]!r} here; this server has {here}", 404)
        return str(model)

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text; `RequestRefused` if it cannot be tokenized, such as a lone surrogate."""
        try:
            return self.engine.tokenizer.tokenize(text)
        except ValueError as error:
            raise RequestRefused(f"the prompt cannot be read: {error}") from None

    def require_within_limits(self, prompt: Sequence[int], num_tokens: int) -> None:
        """Raise `RequestRefused` if a prompt or the number of new tokens exceeds the limits."""
        most, longest = self.limits.new_tokens, self.limits.prompt_tokens
        if longest is not None and len(prompt) > longest:
            raise RequestRefused(f"the prompt has {len(prompt)} tokens; this server takes {longest}", 413)
        if most is not None and num_tokens > most:
            raise RequestRefused(f"{num_tokens} new tokens are asked for; this server gives {most}")
        if len(prompt) + max(0, num_tokens - 1) > self.engine.max_length:
            raise RequestRefused(
                f"a prompt of {len(prompt)} tokens and {num_tokens} new ones are more than the {self.engine.max_length} positions of the "
                "network; shorten the prompt or ask for fewer"
            )


def clamped_logprob(token: TokenLogprob) -> float | None:
    """Return a token's log-probability, at least `LEAST_LOGPROB` since JSON has no infinity; None if it has none."""
    return None if token.logprob is None else max(token.logprob, LEAST_LOGPROB)


def round_tiny_temperature_to_zero(temperature: float) -> float:
    """Return the temperature to sample with: 0 (greedy) for those too small to divide by."""
    return 0.0 if temperature < LEAST_TEMPERATURE else float(temperature)
