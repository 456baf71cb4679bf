"""How the arrays of a result are named in the file of a rank."""

from typing import Any

import jax
import numpy as np


def leaves(prefix: str, tree: Any) -> dict[str, np.ndarray]:
    """All arrays by their path; bfloat16, which npz does not know, as float32."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.asarray(leaf)
        array = array.astype(np.float32) if array.dtype.name == "bfloat16" else array
        found[f"{prefix}{jax.tree_util.keystr(path)}"] = array
    return found
