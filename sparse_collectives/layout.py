"""Where the layers of a model lie in the flat buffer."""

import dataclasses
import math
import numbers
from typing import Any

import jax

from sparse_collectives import _validation


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Layout:
    """The shapes of the layers, in the order in which they fill the flat buffer.

    A selector that works by layer or by row needs them, and gets them at
    ``init``. It is static and holds no arrays: in a state it is part of the tree.

    Attributes:
      shapes: the shape of each layer. A layer without entries takes no place.

    Raises:
      ValueError: no entries at all, or 2**31 or more.

    Example:
      >>> layout = Layout(((2, 3), (3,)))
      >>> layout.size, layout.sizes, layout.offsets
      (9, (6, 3), (0, 6))
    """

    shapes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        _validation.check_size(self.size)

    @classmethod
    def of(cls, tree: Any) -> "Layout":
        """The layout of the leaves of a pytree, in the order of ``jax.tree.leaves``."""
        return cls(tuple(tuple(leaf.shape) for leaf in jax.tree.leaves(tree)))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of entries of each layer."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def size(self) -> int:
        """n, the number of entries of all layers."""
        return sum(self.sizes)

    @property
    def offsets(self) -> tuple[int, ...]:
        """The place of the first entry of each layer."""
        sizes = self.sizes
        return tuple(sum(sizes[:layer]) for layer in range(len(sizes)))


def as_layout(size: int | Layout) -> Layout:
    """A number of entries means one layer of one dimension."""
    if isinstance(size, Layout):
        return size
    if isinstance(size, bool) or not isinstance(size, numbers.Integral):
        raise TypeError(
            f"size must be a number of entries or a Layout, got {size!r}. Write "
            "init(x.size), or init(Layout.of(params)) for a selection by layer."
        )
    return Layout(((int(size),),))
