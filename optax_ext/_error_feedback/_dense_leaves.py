"""Which leaves of the parameters are exchanged densely instead of in the sparse buffer."""

from typing import Any

import jax

LABELS = ("sparse", "dense")


def resolve(labels: Any, params: Any) -> tuple[bool, ...] | None:
    """Whether each leaf of ``params`` is dense, in the order of the leaves.

    Args:
      labels: None, a label function, or a pytree of labels. A label holds for all leaves
        below it, as in ``optax.multi_transform``.
      params: the parameters.

    Raises:
      ValueError: a leaf without a label, a label without a leaf, another label.
    """
    if labels is None:
        return None
    flat = jax.tree_util.tree_flatten_with_path
    labels = flat(labels(params) if callable(labels) else labels)[0]
    for path, label in labels:
        if label not in LABELS:
            raise ValueError(
                f"dense_leaves labels params{jax.tree_util.keystr(path)} {label!r}: a label is one "
                f"of {LABELS}."
            )
    found, used = [], set()
    for path, _ in flat(params)[0]:
        above = [at for at, _ in labels if path[: len(at)] == at]
        if not above:
            raise ValueError(
                f"dense_leaves has no label for params{jax.tree_util.keystr(path)}. Label every "
                "leaf 'sparse' or 'dense'; optax_ext.small_leaves() does it by shape."
            )
        used.add(above[0])
        found.append(dict(labels)[above[0]] == "dense")
    unused = [at for at, _ in labels if at not in used]
    if unused:
        raise ValueError(
            f"dense_leaves has a label for params{jax.tree_util.keystr(unused[0])}, which is no "
            "leaf of the parameters and has none below it."
        )
    return tuple(found)
