"""Transformations whose ``init`` may be called inside a mapped function and outside of it."""

from collections.abc import Callable, Hashable
from typing import Any, cast

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from optax_ext._state import _calls, _init
from optax_ext._step import _layout
from sparse_collectives import AxisName, _compat


def transformation(
    init: Callable[[Any], Any], update: Callable[..., Any], axis: AxisName
) -> optax.GradientTransformationExtraArgs:
    """``init`` and ``update``, which need the axis, as a transformation.

    Where the axis is not bound, ``init`` makes the state of all workers on the mesh of
    ``jax.set_mesh``, as :func:`optax_ext.init_state` does.
    """

    def anywhere(params: Any) -> Any:
        if _compat.axis_is_bound(axis):
            return init(params)
        names = _compat.axis_names(axis)
        if _layout.is_placeholder(params):
            return _of_one(init, names)(params)
        mesh = _compat.ambient_mesh()
        if mesh is None or not set(names) <= set(mesh.axis_names):
            return init(params)  # It says what is missing.
        return _init.init_state(made, params, mesh)

    # optax types a state as any pytree, which NamedTuples of arrays are at run time.
    made = optax.GradientTransformationExtraArgs(cast(Any, anywhere), cast(Any, update))
    return made


def _of_one(init: Callable[[Any], Any], names: tuple[Hashable, ...]) -> Callable[[Any], Any]:
    """The shapes of the state of one worker."""
    for name in names:
        init = jax.vmap(init, in_axes=None, axis_name=name, axis_size=1)
    return lambda params: jax.eval_shape(lambda: init(params))


def with_mesh(
    tx: optax.GradientTransformation, mesh: Mesh | AbstractMesh, *, specs: Any = None
) -> optax.GradientTransformationExtraArgs:
    """``tx`` whose ``init`` makes the state of all workers on a mesh, wherever it is called.

    For what calls ``tx.init(params)`` by itself and knows of no mesh, as flax's
    ``TrainState.create`` and ``nnx.Optimizer`` do. Under ``jax.set_mesh(mesh)`` this is not needed.

    Args:
      tx: a transformation with :func:`sparse_allreduce` or :func:`dense` anywhere in it.
      mesh: as in :func:`init_state`.
      specs: as in :func:`init_state`.

    Returns:
      An ``optax.GradientTransformationExtraArgs``. Its ``update`` is that of ``tx``, and inside a
      mapped function so is its ``init``.

    Raises:
      ValueError: at ``init``: see :func:`init_state`.
      TypeError: a ``tx`` that is no transformation, a ``mesh`` that is none.

    Example:
      >>> import jax, jax.numpy as jnp, optax_ext
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> tx = with_mesh(optax_ext.sparse_sgd(0.1, axis="data"), mesh)
      >>> tx.init({"w": jnp.zeros(4)}).residual.shape
      (1, 4)
    """
    _calls.check_transformation("optax_ext.with_mesh(tx, mesh)", tx, mesh, AbstractMesh)
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> Any:
        if _compat.bound_axes() or _layout.is_placeholder(params):
            return tx.init(params)
        return _init.init_state(tx, params, mesh, specs=specs)

    return optax.GradientTransformationExtraArgs(cast(Any, init), tx.update)
