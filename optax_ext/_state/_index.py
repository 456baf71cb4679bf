"""An index of an optimizer state: the role of each array for the workers.

It is made once for each structure of a state, from the declarations of the states in it
(:mod:`optax_ext._error_feedback._roles`). Wrappers of other libraries are
passed through; none is recognized by the names of its fields.
"""

import dataclasses
import functools
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import PartitionSpec

from optax_ext._error_feedback import _roles
from optax_ext._error_feedback._layout import TreeLayout
from optax_ext._error_feedback._roles import Field, Role, Rows
from optax_ext._error_feedback._sparse_state import Settings, SparseAllreduceState
from optax_ext._state import _whole_optimizers, _wrappers
from sparse_collectives import _axes

_WHOLE = Field(Role.SHARED, Rows.NONE)
# optax's public state. Around a reduction its gradients are local, and have no axis for the
# workers: outside of the mapped function they are concatenated along the first one.
_AROUND = {"acc_grads": Field(Role.SUMMED, Rows.JOINED)}


class Leaf(NamedTuple):
    """An array of a state; ``spec`` is over the axes of the workers, of shards, and of devices.

    ``reduces`` says whether it is in the state of a sparse reduction, and not around one, and
    ``in_rounds`` whether it is in one with ``every=``, or in the state of local steps.
    """

    role: Role
    rows: Rows
    spec: PartitionSpec
    reduces: bool
    in_rounds: bool


class Moved(NamedTuple):
    """The movement of each worker, in one state of local steps: leaves ``[start, stop)`` of all."""

    start: int
    stop: int
    treedef: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Index:
    """What :func:`of` returns.

    Attributes:
      leaves: each array of the state.
      sparse: the settings and layout of each sparse reduction. States for any number of workers
        have the same index, so none is recorded.
      moves: the movements of local steps.
      axes: the axes that the reductions name; one, unless there is a mistake.
      only_sparse: whether no reduction is dense.
      misuse: an error text about transformations around the reductions or next to them, or None.
    """

    leaves: tuple[Leaf, ...]
    sparse: tuple[tuple[Settings, TreeLayout], ...]
    moves: tuple[Moved, ...]
    axes: tuple[Hashable, ...]
    only_sparse: bool
    misuse: str | None

    @functools.cached_property
    def specs(self) -> list[PartitionSpec]:
        """The spec of each array."""
        return [leaf.spec for leaf in self.leaves]

    @functools.cached_property
    def every(self) -> tuple[int, ...]:
        """The different numbers of steps between two exchanges."""
        return tuple(sorted({settings.every for settings, _ in self.sparse}))

    @property
    def takes_local_steps(self) -> bool:
        """Whether workers take steps on their own between two exchanges."""
        return bool(self.moves) or any(every > 1 for every in self.every)

    @functools.cached_property
    def looks_ahead(self) -> bool:
        """Whether a share of a residual is applied before a gradient is taken."""
        return any(settings.step_ahead for settings, _ in self.sparse)

    @functools.cached_property
    def has_gradients(self) -> bool:
        """Whether there are residuals that may be gradients, which are no updates to apply."""
        return any(layout.size and not settings.step_ahead for settings, layout in self.sparse)

    @functools.cached_property
    def is_parted(self) -> bool:
        """Whether the devices of a worker have parts of the residuals."""
        return any(layout.sharding.axes for _, layout in self.sparse)

    @functools.cached_property
    def is_whole(self) -> bool:
        """Whether each worker is one device, with a residual of all parameters."""
        return not self.is_parted and not any(settings.shard_axis for settings, _ in self.sparse)

    @functools.cached_property
    def accumulates(self) -> bool:
        """Whether a wrapper keeps gradients or movements of the workers for a later exchange."""
        adds_up = Role.SUMMED, Role.MOVED
        return any(leaf.role in adds_up and not leaf.reduces for leaf in self.leaves)

    @functools.cached_property
    def joins(self) -> bool:
        """Whether a wrapper keeps gradients of the workers that outside are joined in one array."""
        return any(leaf.rows is Rows.JOINED for leaf in self.leaves)

    @property
    def axis(self) -> Any:
        """The axis that the reductions were made for.

        Raises:
          ValueError: there is none, or they name different axes.
        """
        if len(self.axes) == 1:
            return self.axes[0]
        if not self.axes:
            raise ValueError(
                "opt_state has no sparse allreduce, and no optax_ext.dense, in it, so the axis "
                "over which gradients are averaged is unknown. Make it with "
                "optax_ext.init_state(tx, params, mesh), where tx is an optimizer of optax_ext, or "
                "has optax_ext.ok_topk(density=..., axis='data') or optax_ext.dense(axis='data') "
                "first in its chain. A function that only evaluates needs jax.jit alone."
            )
        names = " and ".join(map(repr, self.axes))
        raise ValueError(
            f"tx has allreduces over different axes, {names}: all of them average the gradients of "
            "the same workers. Give each the same axis=, as a tuple if it has several names."
        )

    def check(self, opt_state: Any) -> None:
        """Raises a ValueError if a wrapper around a reduction, or its state, can't be there."""
        if self.misuse is not None:
            raise ValueError(self.misuse)
        if self.joins:
            _wrappers.check_multi_steps(opt_state)

    def moved(self, leaves: list[Any]) -> list[Any]:
        """How far each worker has moved, from all leaves of a state, with a leading axis."""
        return [x.treedef.unflatten(leaves[x.start : x.stop]) for x in self.moves]


def of(opt_state: Any) -> Index:
    """The index of an optimizer state, or of anything of its structure."""
    return index_of(jax.tree.structure(opt_state))


def index_of(structure: Any) -> Index:
    """The index of all optimizer states with this tree."""
    try:
        return _cached(structure)
    except _OfPlaceholder as found:
        return found.index


class _OfPlaceholder(Exception):
    """The index of a placeholder's state, whose layout compares equal to any other."""

    def __init__(self, index: Index):
        self.index = index


@functools.lru_cache(maxsize=256)
def _cached(structure: Any) -> Index:
    found = _made(structure)
    if any(layout.of_placeholder for _, layout in found.sparse):
        # An error is not cached.
        raise _OfPlaceholder(found)
    return found


def _made(structure: Any) -> Index:
    tree = structure.unflatten(range(structure.num_leaves))
    nothing = _Around(_WHOLE, None, False)
    found = _Found([nothing] * structure.num_leaves, [])
    _walk(tree, nothing, found)
    reductions = _wrappers.reductions(tree)
    axes = tuple(dict.fromkeys(map(_axis_of, reductions)))
    sparse = [x for x in reductions if isinstance(x, SparseAllreduceState)]
    return Index(
        leaves=tuple(
            Leaf(field.role, field.rows, _spec(field, axes, state), state is not None, in_rounds)
            for field, state, in_rounds in found.leaves
        ),
        sparse=tuple((x.settings, x.layout) for x in sparse),
        moves=tuple(found.moves),
        axes=axes,
        only_sparse=len(sparse) == len(reductions),
        misuse=_wrappers.misuse(tree) or _whole_optimizers.misuse(tree),
    )


class _Around(NamedTuple):
    """The field and the sparse reduction around a leaf, and whether workers take steps in it."""

    field: Field
    sparse: SparseAllreduceState | None
    in_rounds: bool


class _Found(NamedTuple):
    """The surroundings of each leaf, and the movements."""

    leaves: list[_Around]
    moves: list[Moved]


def _walk(tree: Any, around: _Around, found: _Found) -> None:
    """Goes through a tree of numbers of leaves, which are as a field says unless it declares."""
    if around.field.role is Role.MOVED:
        numbers, treedef = jax.tree.flatten(tree)
        start = min(numbers, default=0)
        found.moves.append(Moved(start, start + len(numbers), treedef))
    for child in jax.tree.leaves(tree, is_leaf=_declares):
        if not _declares(child):
            found.leaves[child] = around
            continue
        fields, sparse, in_rounds = _fields_of(child, around.field), around.sparse, around.in_rounds
        in_rounds = in_rounds or any(field.role is Role.MOVED for field in fields.values())
        if isinstance(child, SparseAllreduceState):
            sparse, in_rounds = child, in_rounds or child.settings.every > 1
        for name, here in fields.items():
            below = getattr(child, name)
            _walk(below, _Around(here, sparse, in_rounds), found)
            if here.role is Role.SUMMED and not isinstance(child, SparseAllreduceState):
                # An accumulator around an exchange in rounds is as that exchange is.
                for number, is_so in zip(jax.tree.leaves(below), _in_rounds(child, below)):
                    made = found.leaves[number]
                    found.leaves[number] = made._replace(in_rounds=made.in_rounds or is_so)


def _in_rounds(node: Any, accumulator: Any) -> list[bool]:
    """Which leaves of an accumulator in ``node`` go to an exchange in rounds inside of it."""
    inside = [
        jax.tree.unflatten(state.layout.treedef, state.layout.dense)
        for state in _wrappers.get_states(node)
        if state.settings.every > 1
    ]
    inside += [state.moved for state in _wrappers.moving(node)]
    own, parts = _wrappers.Paths(accumulator), list(map(_wrappers.Paths, inside))
    # Buckets have trees of their own.
    whole = not all(part.fits(own) for part in parts)
    reached = {path for part in parts for path in part.present}
    return [whole or path in reached for path in own.present]


def _declares(node: Any) -> bool:
    return type(node) in _roles.FIELDS or isinstance(node, optax.MultiStepsState)


def _fields_of(node: Any, around: Field) -> Mapping[str, Field]:
    if isinstance(node, optax.MultiStepsState):
        others = dict.fromkeys(node._fields, around)
        # After the reduction all workers have the same gradients.
        return {**others, **_AROUND} if _wrappers.reductions(node) else others
    fields = dict(_roles.FIELDS[type(node)])
    if isinstance(node, SparseAllreduceState) and node.settings.by_leaf:
        fields["local"] = dataclasses.replace(fields["local"], rows=Rows.WORKER)
    return fields


def _axis_of(reduction: Any) -> Hashable:
    if isinstance(reduction, SparseAllreduceState):
        return reduction.settings.axis
    return reduction.axis


def _spec(field: Field, axes: Any, sparse: SparseAllreduceState | None) -> PartitionSpec:
    rows, axis = field.rows, axes[0] if axes else ()
    if rows is Rows.NONE:
        return PartitionSpec()
    devices = () if sparse is None else sparse.layout.sharding.axes
    if rows is Rows.SHARD:
        shards = (*(() if sparse is None else sparse.settings.shard_axis), *devices)
        return PartitionSpec(shards) if shards else PartitionSpec()
    if rows in (Rows.DEVICE, Rows.DENSE) and devices:
        return PartitionSpec((*_axes.axis_names(axis), *devices))
    return PartitionSpec(axis)
