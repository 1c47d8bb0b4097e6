"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them: adapters that come and go while the server runs.

    {"lora_name": "french", "lora_path": "runs/french/peft"}  ->  requests with "model": "french"

A path is one of the server's machine, and every caller may have any folder read there: so the routes are off unless the server is
started with --allow-runtime-lora-updating.
"""

from __future__ import annotations

from megatron.core.config.flags import ConfigError
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.inference.server.body_fields import BodyField, RequestRefused, read_body_fields, text_problem
from megatron.inference.server.request_handling import refusal_for_error
from megatron.inference.server.serving import GenerationServing
from megatron.inference.service_thread import ServiceStoppedError

LOAD = (BodyField("lora_name", text_problem, needed=True), BodyField("lora_path", text_problem, needed=True))
UNLOAD = (BodyField("lora_name", text_problem, needed=True),)


def handle_load_adapter(body: bytes, serving: GenerationServing) -> str:
    """Load an adapter as a request body says; return the response text. Raises `RequestRefused` if it cannot be served."""
    _require_lora_updating_allowed(serving)
    fields = read_body_fields(LOAD, body)
    try:
        serving.load_adapter(fields["lora_name"], fields["lora_path"])
    except CheckpointError as error:
        summary, *problems = str(error).splitlines()
        raise RequestRefused(
            ": ".join([summary, "; ".join(map(str.strip, problems))]) if problems else summary
        ) from error
    except (ConfigError, ServiceStoppedError) as error:
        raise refusal_for_error(error) from error
    return f"Success: LoRA adapter '{fields['lora_name']}' added successfully."


def handle_unload_adapter(body: bytes, serving: GenerationServing) -> str:
    """Unload the adapter that a request body names; return the response text. Raises `RequestRefused` if it is not loaded."""
    _require_lora_updating_allowed(serving)
    name = read_body_fields(UNLOAD, body)["lora_name"]
    if name not in serving.engine.adapters.names:
        here = ", ".join(serving.engine.adapters.names) or "none"
        raise RequestRefused(f"there is no adapter {name[:100]!r} here; this server has {here}", 404)
    try:
        serving.service.run_between_steps(lambda: serving.engine.adapters.unload(name))
    except (ConfigError, ServiceStoppedError) as error:
        raise refusal_for_error(error) from error
    return f"Success: LoRA adapter '{name}' removed successfully."


def _require_lora_updating_allowed(serving: GenerationServing) -> None:
    """Raise `RequestRefused` (403) unless the server allows adapters to be changed."""
    if not serving.updates_adapters:
        raise RequestRefused(
            "adapters are not changed while this server runs; start it with --allow-runtime-lora-updating", 403
        )
