"""The form of a computation that suits a platform, with the same results to the bit.

A CPU likes one pass at the speed of memory and small loops. A GPU pays some microseconds for
each kernel that it launches, and for each turn of a loop several: it likes few kernels, however
much they count.
"""

import contextlib
import contextvars
from collections.abc import Callable, Generator
from typing import Any

from jax import lax

from sparse_collectives import _validation

GPU, PORTABLE = "gpu", "portable"
_forced: contextvars.ContextVar[str | None] = contextvars.ContextVar("form", default=None)


def by_platform(portable: Callable[..., Any], gpu: Callable[..., Any], *args: Any) -> Any:
    """``gpu(*args)`` in programs for CUDA and ROCm, ``portable(*args)`` in those for all else.

    Which it is, is known when a program is lowered, so that it holds one of the two.
    """
    forced = _forced.get()
    if forced is not None:
        return (gpu if forced == GPU else portable)(*args)
    return lax.platform_dependent(*args, cuda=gpu, rocm=gpu, default=portable)


@contextlib.contextmanager
def traced_for(name: str) -> Generator[None]:
    """What is traced within has the form ``name``, "gpu" or "portable", on every platform.

    For programs that are compiled ahead of time on a machine without a GPU, and for tests.
    """
    _validation.check_choice("name", name, (GPU, PORTABLE))
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)
