"""The mpu functions of Megatron, for user scripts: they read the one mesh that initialize_megatron installed.

Our own code is handed its mesh and never calls these.
"""

from __future__ import annotations

from torch.distributed import ProcessGroup

from megatron.core.parallel.mesh import Mesh

_MESH: Mesh | None = None


def set_mesh(mesh: Mesh) -> None:
    """Make this the mesh that the functions below speak of."""
    global _MESH
    _MESH = mesh


def get_mesh() -> Mesh:
    """The installed mesh."""
    if _MESH is None:
        raise RuntimeError("model parallelism is not initialized; call initialize_megatron first")
    return _MESH


def model_parallel_is_initialized() -> bool:
    """Whether there is a mesh."""
    return _MESH is not None


def get_tensor_model_parallel_group() -> ProcessGroup | None:
    """Ranks that share each layer's matrices; None if there is one."""
    return get_mesh().tp.group


def get_tensor_model_parallel_world_size() -> int:
    """Size of the tensor axis."""
    return get_mesh().tp.size


def get_tensor_model_parallel_rank() -> int:
    """This rank's place on the tensor axis."""
    return get_mesh().tp.rank


def get_pipeline_model_parallel_group() -> ProcessGroup | None:
    """Ranks of this pipeline; None if there is one."""
    return get_mesh().pp.group


def get_pipeline_model_parallel_world_size() -> int:
    """Size of the pipeline axis."""
    return get_mesh().pp.size


def get_pipeline_model_parallel_rank() -> int:
    """This rank's place on the pipeline axis."""
    return get_mesh().pp.rank


def is_pipeline_first_stage() -> bool:
    """Whether this rank stands at the beginning of the pipeline."""
    return get_mesh().pp.is_first


def is_pipeline_last_stage() -> bool:
    """Whether this rank stands at the end of the pipeline."""
    return get_mesh().pp.is_last


def get_data_parallel_group() -> ProcessGroup | None:
    """Ranks that hold the same weights; None if there is one."""
    return get_mesh().dp.group


def get_data_parallel_world_size() -> int:
    """Size of the data axis."""
    return get_mesh().dp.size


def get_data_parallel_rank() -> int:
    """This rank's place on the data axis."""
    return get_mesh().dp.rank


def get_context_parallel_world_size() -> int:
    """Size of the context axis."""
    return get_mesh().cp.size


def get_context_parallel_rank() -> int:
    """This rank's place on the context axis."""
    return get_mesh().cp.rank
