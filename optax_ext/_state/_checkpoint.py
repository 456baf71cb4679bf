"""What a checkpoint of an optimizer state needs besides its arrays."""

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from optax_ext._error_feedback._sparse_state import SparseAllreduceState
from optax_ext._state import (
    _find,
    _host_checks,
    _init,
    _nnx,
    _placement,
    _shards,
    _specs,
    _wrappers,
)
from sparse_collectives import __version__, _axes

# The format of the metadata and of the states that it describes. It grows when the structure of a
# state or the meaning of a spec changes, and not with every version of the library.
FORMAT = 8


def abstract_state(
    tx: optax.GradientTransformation,
    params: Any,
    mesh: Mesh | AbstractMesh,
    *,
    sharding: Sharding | None = None,
    specs: Any = None,
) -> Any:
    """Shapes, dtypes and shardings of ``init_state``, without any array.

    Use it as the target of a restored checkpoint. Cost: one trace of ``tx.init``.

    Args:
      tx: as for :func:`optax_ext.init_state`.
      params: the parameters, or their ``jax.ShapeDtypeStruct``s.
      mesh: the mesh. An ``AbstractMesh`` stands for workers that this program does
        not have, such as the workers that wrote a checkpoint.
      sharding: the sharding of every restored array, instead of the placement that ``init_state``
        would choose. Required with an ``AbstractMesh``.
      specs: as for :func:`optax_ext.init_state`, for parameters that are sharded over other axes
        of the mesh and do not carry that sharding themselves.

    Returns:
      A pytree of ``jax.ShapeDtypeStruct``.

    Raises:
      ValueError: the mesh lacks the axis of ``tx``.
      ValueError: an ``AbstractMesh`` without ``sharding``.
    """
    if sharding is None and not isinstance(mesh, Mesh):
        raise ValueError(
            "mesh is an AbstractMesh, which has no devices to restore to. Give for example "
            "sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])."
        )
    given = _placement.given_of(params, mesh, specs)
    made = None if given is None else _placement.specs_like(params, given)
    shapes = jax.eval_shape(lambda p: _init.init_state(tx, p, mesh, specs=made), params)

    def place(spec, tree):
        where = NamedSharding(mesh, spec) if sharding is None else sharding
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)

    if given is None or not _wrappers.reductions(shapes):
        places = _specs.state_specs(shapes)
    else:
        places = _placement.placements(shapes, params, given)
    return jax.tree.map(place, places, shapes)


def checkpoint_metadata(opt_state: Any) -> dict[str, Any]:
    """The settings that an optimizer state was made for, to save with it; JSON can hold them.

    Args:
      opt_state: the state of all workers, or its :func:`abstract_state`, or an
        ``nnx.Optimizer``.

    Returns:
      A dict with

      - ``format``: a number that grows when the structure of states changes.
      - ``version``: the version of the library, for information.
      - ``workers``: P.
      - ``sparse``: for the path of each :class:`SparseAllreduceState`, its settings. They are the
        workers, the entries n, the selector and the allreduce, the states of the local
        transformation, and the dtype and decay of the residual. The momentum correction, the steps
        between two exchanges, the dense leaves, and the shape and dtype of each parameter follow.
      - ``arrays``: the shape and dtype of every array, by its path.

    Raises:
      ValueError: the state is of one worker alone, or was copied to all workers, as
        ``flax.jax_utils.unreplicate`` and ``replicate`` do.
      ValueError: a selector, allreduce or correction has no ``spec``, without which two different
        ones look the same.
    """
    opt_state = _nnx.arrays(opt_state)
    nodes = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=_wrappers.is_state)
    states = {
        jax.tree_util.keystr(path): node
        for path, node in nodes
        if isinstance(node, SparseAllreduceState)
    }
    for path, node in states.items():
        _host_checks.check_whole(f"opt_state{path}", node)
    _host_checks.check_own("opt_state", opt_state)
    sparse = {path: _metadata_of(node) for path, node in states.items()}
    arrays = {
        jax.tree_util.keystr(path): _described(np.shape(leaf), leaf.dtype)
        for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state)
    }
    workers = max((node["workers"] for node in sparse.values()), default=0)
    workers = workers or _find.workers_of(opt_state) or 1
    return {
        "format": FORMAT,
        "version": __version__,
        "workers": workers,
        "sparse": sparse,
        "arrays": arrays,
    }


def check_metadata(saved: dict[str, Any], opt_state: Any) -> None:
    """Checks that a checkpoint fits a state, before any of it is read.

    Args:
      saved: :func:`checkpoint_metadata` of the state in the checkpoint.
      opt_state: the state to restore into, or its :func:`abstract_state`, or an
        ``nnx.Optimizer``.

    Raises:
      TypeError: ``saved`` is not such a dictionary, so the checkpoint has no metadata.
      ValueError: the checkpoint has another format, number of workers, density, algorithm,
        parameters, or shape or dtype of an array. The message names up to 20 differences.
    """
    if not isinstance(saved, dict) or "arrays" not in saved:
        raise TypeError(
            f"saved must be what checkpoint_metadata returned, got {short(saved)}. Save it "
            "with the arrays: checkpointer.save(path, state, "
            "custom_metadata=checkpoint_metadata(state))."
        )
    _check_format(saved)
    expected = checkpoint_metadata(opt_state)
    differences = [
        text for text in _differences("", saved, expected) if not text.startswith("version")
    ]
    if not differences:
        return
    # Differing arrays are a consequence; they are named only if nothing else explains them.
    causes = [text for text in differences if not text.startswith("arrays")] or differences
    advice = "Make the transformation with the settings of the checkpoint"
    workers = saved.get("workers")
    if not equal(workers, expected["workers"]):
        advice += (
            f"; for another number of workers restore the state of {short(workers)} "
            "with optax_ext.abstract_state(..., sharding=...), then call optax_ext.reshard"
        )
    elif all(text.partition(":")[0].endswith((".selector", ".allreduce")) for text in causes):
        advice += (
            ", or restore the state with these, and give it to optax_ext.reshard(opt_state, "
            "optax_ext.init_state(tx, params, mesh))"
        )
    raise ValueError(
        "the checkpoint was saved from another optimizer state:\n  "
        + "\n  ".join(causes[:20])
        + f"\n{advice}."
    )


def _check_format(saved: dict[str, Any]) -> None:
    found = saved.get("format", 1)
    if equal(found, FORMAT):
        return
    version = short(saved.get("version"))
    raise ValueError(
        f"the checkpoint has format {short(found)} (of sparse-collectives {version}), and "
        f"this version reads format {FORMAT}: the structure of the states has changed. With the "
        "version that wrote it, consolidate the residuals into the parameters "
        "(optax_ext.consolidate), save the parameters, and start from these."
    )


def _metadata_of(node: SparseAllreduceState) -> dict[str, Any]:
    layout = node.layout
    places = jax.tree_util.tree_leaves_with_path(
        jax.tree.unflatten(layout.treedef, range(len(layout.shapes)))
    )
    metadata = {
        "workers": _axes.ranks(node.settings.axis) or node.workers,
        "n": layout.size,
        "selector": _declared("selector", node.settings.selector),
        "allreduce": _declared("allreduce", node.settings.allreduce),
        "local": node.settings.local,
        "residual": node.settings.residual,
        "correction": _declared("correction", node.settings.correction),
        "every": node.settings.every,
        "dense": [jax.tree_util.keystr(path) for path, i in places if layout.dense[i]],
        "params": {
            jax.tree_util.keystr(path): _described(layout.shapes[i], layout.dtypes[i])
            for path, i in places
        },
    }
    sharding = layout.sharding
    if sharding.axes:
        metadata["sharding"] = {
            "devices": dict(zip(map(str, sharding.axes), sharding.sizes, strict=True)),
            "params": {jax.tree_util.keystr(path): str(sharding.spec(i)) for path, i in places},
        }
    if node.settings.shard_axis:
        metadata["workers_in_a_node"] = _shards.workers_in_node(node)
    return metadata


def _declared(name: str, text: str | None) -> str:
    if text is not None:
        return text
    kind = {
        "selector": "sparse_collectives.Selector",
        "allreduce": "sparse_collectives.SparseAllreduce",
        "correction": "optax_ext.MomentumCorrection",
    }[name]
    raise ValueError(
        f"the {name} declares no spec, so a checkpoint can't record its options. Pass spec= when "
        f"you make it: {kind}(..., "
        f"spec=sparse_collectives.Spec.of('my_{name}', density=0.01))."
    )


def _described(shape: tuple[int, ...], dtype: Any) -> str:
    name = dtype if jnp.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype).name
    return f"{name}[{','.join(map(str, shape))}]"


def _differences(path: str, saved: Any, now: Any):
    if isinstance(saved, dict) and isinstance(now, dict):
        for name in sorted({*saved, *now}, key=str):
            # A state that is no part of a chain has an empty path.
            here = ".".join(filter(None, (path, str(name))))
            yield from _differences(here, saved.get(name), now.get(name))
    elif not equal(saved, now):
        there, here = short(saved), short(now)
        yield f"{short(path)}: {there} in the checkpoint, {here} here"


def equal(one: Any, other: Any) -> bool:
    """Whether both values are of the same kind and equal.

    A tuple counts as a list, as in JSON, and an integer of NumPy as an integer.
    """
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if _is_integer(one) and _is_integer(other):
        return bool(one == other)
    # Types come first, since a comparison with an array gives no single yes or no.
    return type(one) is type(other) and bool(one == other)


def short(value: Any) -> str:
    """The value for an error message."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
