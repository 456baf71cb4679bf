"""Training that goes on when workers die, and lets them come back.

The coordinator is a process of its own, ``python -m optax_ext.elastic --address HOST:PORT
--processes N``; each worker calls :func:`connect` and runs a :class:`Training`. ``docs/faults.md``
says what happens when a worker dies, hangs, is slow or comes back, and when the network splits.
It is for CPUs with Gloo; we have not tried it with GPUs.
"""

from optax_ext.elastic._job import Job, connect
from optax_ext.elastic._training import BatchRequest, Lost, Training

__all__ = ["BatchRequest", "Job", "Lost", "Training", "connect"]
