"""Serve a checkpoint over HTTP: OpenAI's endpoints, Megatron's PUT /api and a web page; of a reward model its scores.

    python tools/run_text_generation_server.py --load runs/quickstart/checkpoints
    torchrun --nproc_per_node 2 tools/run_text_generation_server.py --load FOLDER --tensor-model-parallel-size 2

The page is at /, OpenAI's endpoints at /v1; a reward model answers at /pooling and /v1/score. The first rank answers, the others
take part. SIGTERM lets what runs end. Needs the extra `server`: fastapi and uvicorn.
"""

from __future__ import annotations

import argparse
import logging
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from megatron.adapters.files import LoadedAdapter
from megatron.adapters.saved import require_matching_base, source_base_hash
from megatron.cli.tool_parser import (
    ToolArgumentParser,
    add_checkpoint_options,
    add_dtype,
    add_generation_config_option,
    add_parallel_size_options,
    add_tokenizer_options,
)
from megatron.core.config.flags.declare import (
    ConfigError,
    add_config_arguments,
    config_from_flat_dict,
    config_from_namespace,
)
from megatron.core.config.plan.network import model_config_from_settings
from megatron.core.config.settings.adapter import AdapterConfig
from megatron.core.config.settings.data import SFTDataConfig
from megatron.core.config.settings.inference import InferenceConfig
from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.parallel import ParallelConfig
from megatron.core.datasets.templates import FORMATS as CHAT_FORMATS
from megatron.core.dist_checkpointing.source import CheckpointSource
from megatron.core.tokenizers.base import Tokenizer, read_flag_file_text
from megatron.evaluation.reward_model import RewardModel
from megatron.inference.engine import Engine
from megatron.inference.image_prompts import ImagePromptWriter
from megatron.inference.liveness import RankLiveness, watch_ranks
from megatron.inference.score_service import ScoreService
from megatron.inference.server.chat import ChatPromptEncoder
from megatron.inference.server.serving import GenerationServing, RequestLimits
from megatron.inference.service import EngineService
from megatron.inference.service_thread import ServiceThread
from megatron.training.checkpoint.adapters import open_adapters
from megatron.training.checkpoint.formats import open_checkpoint
from megatron.training.checkpoint.inference_model import (
    GPT,
    REWARD,
    InferenceModel,
    load_network,
    read_request_defaults,
)
from megatron.training.entry import guarded_entry_point
from megatron.training.health.watchdog import RankLostError
from megatron.training.launch.launch_info import has_desktop, read_launch_info

LACKING = ""  # a package without which only --help works
try:
    from megatron.inference.server.app import LOCAL, RequestFilter, build_app
    from megatron.inference.server.http_server import (
        EngineFailed,
        bind_socket,
        run_follower_ignoring_signals,
        serve_on_socket,
    )
    from megatron.inference.server.scoring import ScoringServing, build_scoring_app
except ModuleNotFoundError as missing:
    if missing.name not in ("fastapi", "starlette", "uvicorn"):
        raise
    LACKING = str(missing.name)

BODY_WITH_IMAGES = 2**24
SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
TOKENIZER = ("tokenizer_type", "vocab_file", "merge_file", "tokenizer_model", "chat_template")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = ToolArgumentParser(description=__doc__, allow_abbrev=True)
    what = add_checkpoint_options(parser, "what")
    what.add_argument(
        "--draft", metavar="FOLDER", help="a smaller network with the same tokenizer, for --num-speculative-tokens"
    )
    add_dtype(what)
    add_parallel_size_options(what, SIZES)
    where = parser.add_argument_group("where, and for whom")
    where.add_argument(
        "--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1, this machine only)"
    )
    where.add_argument("--port", type=int, default=5000, metavar="N", help="port; 0: a free one (default: 5000)")
    where.add_argument("--open", action="store_true", help="open the page in this machine's browser, if it has one")
    where.add_argument(
        "--allowed-hosts",
        nargs="+",
        metavar="NAME",
        default=(),
        help="names beside localhost by which the server may be "
        "called (default: at a --host of this machine none, at any other all)",
    )
    where.add_argument(
        "--token-file", metavar="FILE", help="holds the token that clients must show as `Authorization: Bearer TOKEN`"
    )
    where.add_argument(
        "--model-name", metavar="NAME", help="what clients call the network (default: the last part of --load)"
    )
    where.add_argument(
        "--lora-modules",
        nargs="+",
        metavar="NAME=FOLDER",
        default=(),
        help="adapters beside the network: folders of PEFT's or runs with --lora-rank, and what clients call them",
    )
    where.add_argument(
        "--allow-runtime-lora-updating",
        action="store_true",
        help="clients may load adapters from this machine's folders, and unload them",
    )
    where.add_argument(
        "--chat-format",
        choices=("tokenizer", *CHAT_FORMATS),
        default="tokenizer",
        help="how conversations are written (default: by the tokenizer's chat template, if it has one)",
    )
    _add_request_limit_options(parser)
    add_generation_config_option(where)
    add_tokenizer_options(parser, TOKENIZER)
    add_config_arguments(parser, InferenceConfig)
    return parser.parse_args(argv)


def _add_request_limit_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that limit a request."""
    limits, usual = parser.add_argument_group("limits of one call"), RequestLimits()
    limits.add_argument(
        "--max-body-bytes",
        type=int,
        metavar="N",
        help=f"default: {usual.body_bytes}, and {BODY_WITH_IMAGES} if the network reads images",
    )
    limits.add_argument(
        "--max-images", type=int, default=usual.images, metavar="N", help=f"of a conversation (default: {usual.images})"
    )
    limits.add_argument(
        "--max-image-pixels",
        type=int,
        default=2**24,
        metavar="N",
        help="images with more are refused before they are unpacked (default: 16777216)",
    )
    limits.add_argument(
        "--max-prompts",
        type=int,
        default=usual.prompts,
        metavar="N",
        help=f"texts of one call (default: {usual.prompts})",
    )
    limits.add_argument("--max-prompt-tokens", type=int, metavar="N", help="default: the positions of the network")
    limits.add_argument("--max-new-tokens", type=int, metavar="N", help="default: the positions of the network")
    limits.add_argument(
        "--max-connections",
        type=int,
        default=usual.connections,
        metavar="N",
        help=f"clients that may be connected at once; each is a file to the system, see `ulimit -n` (default: {usual.connections})",
    )
    limits.add_argument(
        "--drain-seconds",
        type=float,
        default=20.0,
        metavar="S",
        help="how long requests may go on after SIGTERM; launchers kill 30 s after it (default: 20)",
    )


def read_token_file(given: argparse.Namespace) -> str:
    """Return the bearer token of --token-file, or "". `ConfigError` if no header can hold it."""
    if given.token_file is None:
        return ""
    token = read_flag_file_text(given.token_file, "--token-file").strip()
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError(f"--token-file {given.token_file} must hold one line of printable ASCII")
    return token


def make_chat_encoder(given: argparse.Namespace, tokenizer: Tokenizer) -> ChatPromptEncoder | None:
    """Return the encoder of conversations, or None if neither tokenizer nor command line has a chat template."""
    if given.chat_format == "tokenizer" and tokenizer.chat_template is None:
        return None
    return ChatPromptEncoder(tokenizer, given.chat_format)


def allowed_hosts(given: argparse.Namespace) -> tuple[str, ...]:
    """Return the Host names that requests may have; empty: any."""
    names = tuple(name.lower() for name in given.allowed_hosts)
    return (*LOCAL, *names) if names or listens_locally_only(given) else ()


def listens_locally_only(given: argparse.Namespace) -> bool:
    """Whether the server listens to this machine only."""
    return given.host in (*LOCAL, "::1")


def open_server_page_in_browser(page: str) -> None:
    """Open the page in a browser where there is a desktop. A browser that is slow or fails does not affect the server."""
    if has_desktop():
        threading.Thread(target=webbrowser.open, args=(page,), daemon=True).start()


def served_model_name(given: argparse.Namespace) -> str:
    """Return the name by which clients call the network."""
    return given.model_name or Path(given.load).resolve().name


def adapter_folders_by_name(given: argparse.Namespace) -> dict[str, str]:
    """Return name -> folder of the adapters of --lora-modules. Raises `ConfigError`."""
    pairs = [word.partition("=") for word in given.lora_modules]
    bad = [name + sign + folder for name, sign, folder in pairs if not (name and folder)]
    if bad or len({name for name, _, _ in pairs}) < len(pairs):
        raise ConfigError(f"--lora-modules {' '.join(bad or given.lora_modules)}: write NAME=FOLDER, each name once")
    if served_model_name(given) in {name for name, _, _ in pairs}:
        raise ConfigError(
            f"--lora-modules {served_model_name(given)}=...: so the network is called; choose another name"
        )
    return {name: folder for name, _, folder in pairs}


def make_adapter_opener(
    source: CheckpointSource, model: ModelConfig, names: Sequence[str] = (), *, largest_rank: int | None = None
) -> Callable[[str], LoadedAdapter]:
    """Return a function that opens adapters of the network `source` and checks their base. names: others of it.

    largest_rank: refuse higher ranks before the factors are read.
    """
    hashes: dict[AdapterConfig, str] = {}

    def open_checked_adapters(folder: str) -> LoadedAdapter:
        adapters = open_adapters(folder, model, largest_rank=largest_rank)
        config, known = adapters.model.adapter, adapters.base.get("hash") is not None
        if known and not adapters.saved and config not in hashes:
            hashes[config] = source_base_hash(source, config)
        if not adapters.saved:  # those are refused by the engine
            require_matching_base(adapters, {"hash": hashes.get(config), "where": source.where}, names)
        return adapters

    return open_checked_adapters


@guarded_entry_point
def main() -> None:
    """Load the network, and serve it until a signal."""
    given = parse_arguments()
    if LACKING:
        sys.exit(f"serving needs {LACKING}: pip install fastapi uvicorn")
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("megatron.inference.server").setLevel(logging.INFO)
    place = read_launch_info()
    token, sock = read_token_file(given), bind_socket(given.host, given.port) if place.rank == 0 else None
    parallel = ParallelConfig(**{name: getattr(given, name) for name in SIZES})
    config = config_from_namespace(InferenceConfig, given)
    changed = {name: value for name in TOKENIZER if (value := getattr(given, name)) is not None}
    if model_config_from_settings(open_checkpoint(given.load, given.ckpt_step).settings).reward_head:
        serve_reward_model(given, parallel, changed, sock, token)
        return
    defaults = read_request_defaults(given.load, given.generation_config, step=given.ckpt_step, tokenizer=changed)
    loaded = load_network(
        given.load, GPT, step=given.ckpt_step, parallel=parallel, dtype=given.dtype, tokenizer=changed
    )
    draft = load_network(given.draft, GPT, parallel=parallel, dtype=given.dtype).stages if given.draft else ()
    engine = Engine(loaded.stages, loaded.tokenizer, config, draft=draft)
    enable_image_prompts(engine, loaded, given)
    with watch_ranks(loaded.mesh, place.meeting.rpartition(":")[0]) as liveness:
        if sock is None:
            run_follower_ignoring_signals(engine.run_as_follower)
        else:
            reads = make_adapter_opener(
                loaded.source, loaded.config.model, [served_model_name(given)], largest_rank=config.max_lora_rank
            )
            for name, folder in adapter_folders_by_name(given).items():
                engine.adapters.load(name, reads(folder))
            serve_as_leader(
                engine,
                liveness,
                sock,
                given,
                request_limits_of(given, engine),
                token,
                partial(GenerationServing, open_adapter=reads, defaults=defaults),
            )


def serve_reward_model(
    given: argparse.Namespace,
    parallel: ParallelConfig,
    tokenizer: Mapping[str, str],
    sock: socket.socket | None,
    token: str,
) -> None:
    """Serve a reward model until a signal. Collective. sock: of the first rank, else None."""
    needless = [word for word, value in (("--draft", given.draft), ("--lora-modules", given.lora_modules)) if value]
    if needless:
        raise ConfigError(f"{', '.join(needless)}: {given.load} holds a reward model, which writes no texts; leave out")
    loaded = load_network(
        given.load, REWARD, step=given.ckpt_step, parallel=parallel, dtype=given.dtype, tokenizer=tokenizer
    )
    model, place = RewardModel(loaded, given.chat_format), read_launch_info()
    with watch_ranks(loaded.mesh, place.meeting.rpartition(":")[0]) as liveness:
        if sock is None:
            run_follower_ignoring_signals(model.run_as_follower)
            return
        service = ScoreService(
            model.score_as_leader, close=model.release_followers, device=loaded.mesh.device, liveness=liveness
        )
        limits = RequestLimits(
            given.max_body_bytes or RequestLimits().body_bytes, given.max_prompts, given.max_prompt_tokens
        )
        serving = ScoringServing(
            service,
            served_model_name(given),
            lambda text: model.encode_reward_texts([text])[0],
            loaded.config.model.max_position_embeddings,
            given.chat_format != "tokenizer" or loaded.tokenizer.chat_template is not None,
            replace(limits, connections=given.max_connections),
        )
        service.start()
        serve_and_name_lost_rank(
            build_scoring_app(serving, token=token, hosts=allowed_hosts(given)), service, liveness, sock, given, token
        )


def enable_image_prompts(engine: Engine, loaded: InferenceModel, given: argparse.Namespace) -> None:
    """Give an engine that reads images an encoder of prompts, in its training's format unless the flags differ."""
    if not loaded.config.model.has_vision:
        return
    if given.chat_format == "tokenizer":
        given.chat_format = config_from_flat_dict(SFTDataConfig, loaded.source.settings).sft_tokenizer_prompt_format
    prompts = ImagePromptWriter.from_model(
        loaded.config.model, loaded.tokenizer, loaded.data_settings, given.chat_format
    )
    options = replace(prompts.options, max_pixels=min(prompts.options.max_pixels, given.max_image_pixels))
    engine.image_prompts = replace(prompts, options=options)


def request_limits_of(given: argparse.Namespace, engine: Engine) -> RequestLimits:
    """Return the limits of requests."""
    body = BODY_WITH_IMAGES if engine.image_prompts is not None else RequestLimits().body_bytes
    return RequestLimits(
        given.max_body_bytes or body,
        given.max_prompts,
        given.max_prompt_tokens,
        given.max_new_tokens,
        connections=given.max_connections,
        images=given.max_images,
    )


def serve_as_leader(
    engine: Engine,
    liveness: RankLiveness,
    sock: socket.socket,
    given: argparse.Namespace,
    limits: RequestLimits,
    token: str,
    make_serving: Callable[..., GenerationServing],
) -> None:
    """On the first rank: capture graphs, start the engine's thread, and serve until a signal. make_serving: makes what the
    routes need of the service, the network's name and the limits.
    """
    chat, name = make_chat_encoder(given, engine.tokenizer), served_model_name(given)
    engine.capture_all_graphs(logging.getLogger(__name__).info)
    service = EngineService(engine, liveness)
    service.start()
    serving = make_serving(service, name, limits, updates_adapters=given.allow_runtime_lora_updating)
    app = build_app(serving, chat=chat, token=token, hosts=allowed_hosts(given))
    serve_and_name_lost_rank(app, service, liveness, sock, given, token)


def serve_and_name_lost_rank(
    app: RequestFilter,
    service: ServiceThread,
    liveness: RankLiveness,
    sock: socket.socket,
    given: argparse.Namespace,
    token: str,
) -> None:
    """Serve by a started service until a signal. `RankLostError` if a lost rank ended it, else `EngineFailed`."""
    if not token and not listens_locally_only(given):
        logging.getLogger(__name__).warning(
            "--host %s without --token-file: everyone who reaches this port may use it", given.host
        )
    try:
        serve_on_socket(
            app,
            service,
            sock,
            drain_seconds=given.drain_seconds,
            ready=open_server_page_in_browser if given.open else lambda page: None,
        )
    except EngineFailed as failed:
        if liveness.lost_rank_text:  # which says it all
            raise RankLostError(str(failed)) from None
        raise
