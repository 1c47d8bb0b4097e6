"""The mpu functions of Megatron, for user scripts: they read the one mesh that initialize_megatron installed.

Our own code is handed its mesh and never calls these.
"""

from __future__ import annotations

from torch.distributed import ProcessGroup

from megatron.core.parallel.mesh import Mesh

_MESH: Mesh | None = None


def install_mesh(mesh: Mesh) -> None:
    """Install the mesh that the other functions of this module read; a later call replaces it."""
    global _MESH
    _MESH = mesh


def installed_mesh() -> Mesh:
    """Return the installed mesh. Raises `RuntimeError` if none was installed."""
    if _MESH is None:
        raise RuntimeError("model parallelism is not initialized; call initialize_megatron first")
    return _MESH


def model_parallel_is_initialized() -> bool:
    """Return whether a mesh was installed."""
    return _MESH is not None


def get_tensor_model_parallel_group() -> ProcessGroup | None:
    """Return the process group of this rank's tensor-parallel ranks; None if it is the only one."""
    return installed_mesh().tp.group


def get_tensor_model_parallel_world_size() -> int:
    """Return the number of tensor-parallel ranks."""
    return installed_mesh().tp.size


def get_tensor_model_parallel_rank() -> int:
    """Return this rank's index among its tensor-parallel ranks, from 0."""
    return installed_mesh().tp.rank


def get_pipeline_model_parallel_group() -> ProcessGroup | None:
    """Return the process group of this rank's pipeline-parallel ranks; None if it is the only one."""
    return installed_mesh().pp.group


def get_pipeline_model_parallel_world_size() -> int:
    """Return the number of pipeline-parallel ranks."""
    return installed_mesh().pp.size


def get_pipeline_model_parallel_rank() -> int:
    """Return this rank's index among its pipeline-parallel ranks, from 0."""
    return installed_mesh().pp.rank


def is_pipeline_first_stage() -> bool:
    """Return whether this rank holds the first pipeline stage."""
    return installed_mesh().pp.is_first


def is_pipeline_last_stage() -> bool:
    """Return whether this rank holds the last pipeline stage."""
    return installed_mesh().pp.is_last


def get_data_parallel_group() -> ProcessGroup | None:
    """Return the process group of this rank's data-parallel ranks, which hold the same weights; None if it is the only
    one.
    """
    return installed_mesh().dp.group


def get_data_parallel_world_size() -> int:
    """Return the number of data-parallel ranks."""
    return installed_mesh().dp.size


def get_data_parallel_rank() -> int:
    """Return this rank's index among its data-parallel ranks, from 0."""
    return installed_mesh().dp.rank


def get_context_parallel_world_size() -> int:
    """Return the number of context-parallel ranks, which share each sequence."""
    return installed_mesh().cp.size


def get_context_parallel_rank() -> int:
    """Return this rank's index among its context-parallel ranks, from 0."""
    return installed_mesh().cp.rank
