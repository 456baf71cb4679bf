"""What each field of a state is to the workers, declared on the line of the field.

::

    @declared
    class MyState(NamedTuple):
        count: Annotated[jax.Array, SHARED]
        residual: Annotated[jax.Array, SUMMED]

An array has the role of the innermost declared field around it, and is :data:`SHARED` if there is
none: other libraries' states declare nothing and are passed through. An index of the state of an
optimizer (``_state/_index.py``) is made from these declarations, and everything that treats fields
differently reads them: specs, placements, resharding, handovers, rounds.
"""

import dataclasses
import enum
from typing import Any, TypeVar, get_type_hints

_T = TypeVar("_T", bound=type)


class Role(enum.Enum):
    """What happens to an array when workers come or go."""

    # All workers have the same, and go on with it.
    SHARED = enum.auto()
    # Each worker has its own, and only the sum counts: residuals, velocities, gradients.
    SUMMED = enum.auto()
    # A sum in which each worker also takes its gradients: its movement since the last exchange.
    MOVED = enum.auto()
    # Each worker has its own, made from its own gradients: moments, step counts.
    STATISTIC = enum.auto()
    # Thresholds, regions and periods: evaluated again, except that steps stay counted.
    PERIODIC = enum.auto()
    # It describes one step of one group, or who is in it: made again.
    GROUP = enum.auto()


class Rows(enum.Enum):
    """Who has a row of an array, along its leading dimension."""

    NONE = enum.auto()
    WORKER = enum.auto()
    # Each device of each worker has one; the second has the dense leaves.
    DEVICE = enum.auto()
    DENSE = enum.auto()
    # Each shard of the buffer has one, on each device of a worker.
    SHARD = enum.auto()
    # The rows of a worker are as many as a parameter has.
    JOINED = enum.auto()


class Part(enum.Enum):
    """Which part of a step has to do with a field, if one alone."""

    # Only the part before the exchange reads it.
    LOAD = enum.auto()
    # The exchange changes it.
    EXCHANGE = enum.auto()


SHARED, SUMMED, MOVED = Role.SHARED, Role.SUMMED, Role.MOVED
STATISTIC, PERIODIC, GROUP = Role.STATISTIC, Role.PERIODIC, Role.GROUP
OF_ALL, OF_WORKER, OF_DENSE, OF_SHARD = Rows.NONE, Rows.WORKER, Rows.DENSE, Rows.SHARD
LOAD, EXCHANGE = Part.LOAD, Part.EXCHANGE


@dataclasses.dataclass(frozen=True)
class Field:
    """The declaration of a field.

    Attributes:
      role: what happens to it when workers come or go.
      rows: of whom it has rows; by default of all for :data:`SHARED`, and else of each device.
      part: the part of a step that has to do with it; None: any.
    """

    role: Role
    rows: Rows
    part: Part | None = None


# The fields of each class of states that declares them.
FIELDS: dict[type, dict[str, Field]] = {}


def declared(cls: _T) -> _T:
    """Registers a class of states, each of whose fields is annotated with a role.

    Raises:
      TypeError: a field has no role, and is no static field of a dataclass.
    """
    fields = {}
    for name, hint in get_type_hints(cls, include_extras=True).items():
        marks = getattr(hint, "__metadata__", ())
        role = next((x for x in marks if isinstance(x, Role)), None)
        if role is None and "static" not in marks:
            raise TypeError(
                f"{cls.__name__}.{name} says not what it is to the workers. Write for example "
                f"{name}: Annotated[jax.Array, SHARED], or Annotated[..., 'static'] without arrays."
            )
        if role is not None:
            usual = Rows.NONE if role is Role.SHARED else Rows.DEVICE
            rows = next((x for x in marks if isinstance(x, Rows)), usual)
            part = next((x for x in marks if isinstance(x, Part)), None)
            fields[name] = Field(role, rows, part)
    FIELDS[cls] = fields
    return cls


def names(cls: type, *wanted: Any) -> tuple[str, ...]:
    """The names of the fields whose role, rows or part is one of ``wanted``."""
    found = FIELDS[cls].items()
    return tuple(name for name, x in found if {x.role, x.rows, x.part} & {*wanted})
