"""As much of lm-evaluation-harness 0.4.13 as our model for it touches: its registry, its model class, and a command line that asks
one model for log-likelihoods. Like it, the command line hands over `cuda:0` where no device is named, and knows its own models only.
"""

from __future__ import annotations

from pathlib import Path

FILES = {
    "__init__.py": "",
    "__main__.py": """
import argparse, json
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

def cli_evaluate():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="hf")
    parser.add_argument("--model_args", default="")
    parser.add_argument("--device", default="cuda:0")
    given = parser.parse_args()
    lm = get_model(given.model).create_from_arg_string(given.model_args, {"batch_size": 2, "max_batch_size": None, "device": given.device})
    asked = [Instance((context, continuation)) for context, continuation in (("1 2", " 3"), ("", "4"), ("5 6 7 8", " 9 10"))]
    print(json.dumps({"answers": lm.loglikelihood(asked), "device": str(lm._device)}), flush=True)

if __name__ == "__main__":
    cli_evaluate()
""",
    "utils.py": "def get_rolling_token_windows(**given): raise NotImplementedError\ndef make_disjoint_window(pair): raise NotImplementedError\n",
    "api/__init__.py": "",
    "api/instance.py": "class Instance:\n    def __init__(self, args): self.args = args\n",
    "api/registry.py": """
import importlib

class Registry(dict):
    def register(self, name, *, target): self[name] = target

model_registry = Registry()

def register_model(name):
    def keep(kind):
        model_registry[name] = kind
        return kind
    return keep

def get_model(name):
    import lm_eval.models
    if name not in model_registry:
        raise ValueError(f"no model {name}; there are {', '.join(model_registry)}")
    found = model_registry[name]
    module, _, kind = found.partition(":") if isinstance(found, str) else ("", "", "")
    return getattr(importlib.import_module(module), kind) if module else found
""",
    "models/__init__.py": """
from lm_eval.api.registry import model_registry

MODEL_MAPPING = {"hf": "lm_eval.models.huggingface:HFLM"}
for name, target in MODEL_MAPPING.items():
    model_registry.register(name, target=target)
""",
    "api/model.py": """
class TemplateLM:
    def __init__(self): self._rank, self._world_size, self._device = 0, 1, None

    @classmethod
    def create_from_arg_string(cls, text, more):
        return cls(**dict(word.split("=", 1) for word in text.split(",")), **{name: value for name, value in more.items() if value is not None})

    def loglikelihood(self, requests, disable_tqdm=False):
        pairs = []
        for one in requests:
            context, whole = self.tok_encode(one.args[0]), self.tok_encode(one.args[0] + one.args[1])
            pairs.append((one.args, context or [self.prefix_token_id], whole[len(context):]))
        return self._loglikelihood_tokens(pairs)
""",
}


def write(folder: Path) -> None:
    """Write the package `lm_eval` below a folder."""
    for name, text in FILES.items():
        path = folder / "lm_eval" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
