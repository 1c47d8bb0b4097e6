"""/metrics, in Prometheus' text format (version 0.0.4)."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.inference.requests import EngineMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "megatron_inference_"
# (field of `EngineMetrics`, name, kind, help)
_ROWS = (
    ("requests", "requests_total", "counter", "requests that the engine took in"),
    ("waiting", "requests_waiting", "gauge", "requests that wait to be decoded"),
    ("running", "requests_running", "gauge", "requests that are decoded"),
    ("blocks", "cache_blocks", "gauge", "blocks of the cache"),
    ("blocks_used", "cache_blocks_used", "gauge", "blocks that hold running requests"),
    ("blocks_kept", "cache_blocks_kept", "gauge", "blocks that hold beginnings which nobody uses now"),
    ("bytes_per_token", "cache_bytes_per_token", "gauge", "bytes of keys and values of a token, on a rank"),
    ("state_bytes", "state_bytes", "gauge", "bytes of the states of a text, on a rank, of layers that have them"),
    ("states_kept", "states_kept", "gauge", "beginnings whose states are kept"),
    ("steps", "steps_total", "counter", "forward passes"),
    ("prompt_tokens", "prompt_tokens_total", "counter", "tokens of prompts that were read"),
    ("cached_tokens", "cached_tokens_total", "counter", "tokens of prompts that were in the cache"),
    ("generated_tokens", "generated_tokens_total", "counter", "tokens that were made"),
    ("preempted", "preemptions_total", "counter", "requests that had to wait again"),
    ("proposed_tokens", "proposed_tokens_total", "counter", "tokens that a draft guessed"),
    ("accepted_tokens", "accepted_tokens_total", "counter", "guesses that were right"),
    ("tokens_per_second", "tokens_per_second", "gauge", "tokens made in a second, lately"),
)


def prometheus_text(metrics: EngineMetrics, answers: Mapping[tuple[str, int], int]) -> str:
    """Return an engine's metrics in Prometheus' text format. answers: number of HTTP responses by (path, status)."""
    lines = []
    for field, name, kind, description in _ROWS:
        lines += [*_prometheus_metric_header(name, kind, description), f"{_PREFIX}{name} {getattr(metrics, field)}"]
    lines += _prometheus_metric_header("finished_total", "counter", "requests that ended, by the reason")
    lines += [
        f'{_PREFIX}finished_total{{reason="{reason}"}} {count}' for reason, count in sorted(metrics.finished.items())
    ]
    lines += _prometheus_metric_header("http_answers_total", "counter", "HTTP answers, by path and status")
    lines += [
        f'{_PREFIX}http_answers_total{{path="{path}",status="{status}"}} {count}'
        for (path, status), count in sorted(answers.items())
    ]
    return "\n".join(lines) + "\n"


def _prometheus_metric_header(name: str, kind: str, description: str) -> list[str]:
    return [f"# HELP {_PREFIX}{name} {description}", f"# TYPE {_PREFIX}{name} {kind}"]
