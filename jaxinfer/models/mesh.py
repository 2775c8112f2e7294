"""The mesh axis over which a model is cut."""

from __future__ import annotations

import jax

MODEL_AXIS = "model"


def model_parallelism() -> int:
    """Devices along MODEL_AXIS of the mesh in force; 1 without one."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[MODEL_AXIS] if not mesh.empty and MODEL_AXIS in mesh.axis_names else 1
