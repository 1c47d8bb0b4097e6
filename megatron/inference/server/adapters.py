"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them: adapters that come and go while the server runs.

    {"lora_name": "french", "lora_path": "runs/french/peft"}  ->  requests with "model": "french"

A path is one of the server's machine, and every caller may have any folder read there: so the routes are off unless the server is
started with --allow-runtime-lora-updating.
"""

from __future__ import annotations

from megatron.core.config.flags import ConfigError
from megatron.core.dist_checkpointing.store import CheckpointError
from megatron.inference.server.fields import Field, Refused, check_text, read
from megatron.inference.server.request_handling import error_response
from megatron.inference.server.serving import Serving
from megatron.inference.service import Stopped

LOAD = (Field("lora_name", check_text, needed=True), Field("lora_path", check_text, needed=True))
UNLOAD = (Field("lora_name", check_text, needed=True),)


def load(body: bytes, serving: Serving) -> str:
    """Serve another adapter; what to answer. Raises `Refused` with one sentence for one that cannot be served."""
    _demand_allowed(serving)
    fields = read(LOAD, body)
    try:
        serving.load_adapter(fields["lora_name"], fields["lora_path"])
    except CheckpointError as error:
        summary, *problems = str(error).splitlines()
        raise Refused(": ".join([summary, "; ".join(map(str.strip, problems))]) if problems else summary) from error
    except (ConfigError, Stopped) as error:
        raise error_response(error) from error
    return f"Success: LoRA adapter '{fields['lora_name']}' added successfully."


def unload(body: bytes, serving: Serving) -> str:
    """Serve an adapter no more; what to answer. Raises `Refused` for one that there is not."""
    _demand_allowed(serving)
    name = read(UNLOAD, body)["lora_name"]
    if name not in serving.adapters:
        here = ", ".join(serving.adapters) or "none"
        raise Refused(f"there is no adapter {name[:100]!r} here; this server has {here}", 404)
    try:
        serving.service.run_between_steps(lambda: serving.service.engine.adapters.unload(name))
    except (ConfigError, Stopped) as error:
        raise error_response(error) from error
    return f"Success: LoRA adapter '{name}' removed successfully."


def _demand_allowed(serving: Serving) -> None:
    if not serving.updates_adapters:
        raise Refused(
            "adapters are not changed while this server runs; start it with --allow-runtime-lora-updating", 403
        )
