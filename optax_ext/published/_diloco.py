"""DiLoCo and its kin: systems that exchange after a round of local steps."""

import optax

from optax_ext._error_feedback import _options
from optax_ext._transforms._dense import dense
from optax_ext._transforms._local_steps import local_steps
from optax_ext._transforms._residual import residual
from optax_ext._transforms._sparse_allreduce import selection, sparse_allreduce
from sparse_collectives import AxisName, Codec, Selector, allreduce, select


def diloco(
    inner: optax.GradientTransformation,
    *,
    axis: AxisName,
    every: int,
    outer_rate: optax.ScalarOrSchedule = 0.7,
    momentum: float = 0.9,
    nesterov: bool = True,
    buckets: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """DiLoCo: rounds of local steps, and Nesterov's momentum for the mean of their changes.

    With its defaults an outer gradient moves the parameters by 1.33 times itself at once and by
    7 times in the end, 0.7 / (1 - 0.9). It is made for hundreds of steps in a round, and hurts
    when rounds are short. With ``momentum=0.0`` and ``outer_rate=1.0`` the workers are averaged
    (local SGD). With ``inner=optax.contrib.muon(...)`` it is MuLoCo, whose momentum is 0.8 to 0.6.

    Args:
      inner: the optimizer of each worker, such as ``optax.adamw(4e-4)``.
      axis: the mesh axis (or a tuple of them) of the workers.
      every: H, steps in a round; 500 in the paper.
      outer_rate: the learning rate of the outer optimizer, or a schedule of rounds.
      momentum: the momentum of the outer optimizer.
      nesterov: whether that is Nesterov's.
      buckets: into how many sums the leaves are joined, as in :func:`optax_ext.dense`: 1 if a
        message takes long. None: each leaf alone, for parameters that are sharded in a worker.

    Returns:
      An optimizer, an ``optax.GradientTransformationExtraArgs``; see
      :func:`optax_ext.local_steps`. Words: ``2 n (P-1)/P`` for each round.

    Example:
      >>> import optax
      >>> tx = diloco(optax.adamw(1e-3), axis="data", every=100)

    References:
      Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_, 2023, Algorithm 1;
      Thérien et al., `MuLoCo <https://arxiv.org/abs/2505.23725>`_, 2025.
    """
    outer = _dense_outer(axis, outer_rate, momentum, nesterov, buckets)
    return local_steps(inner, outer, every=every)


def streaming_diloco(
    inner: optax.GradientTransformation,
    *,
    axis: AxisName,
    every: int,
    fragments: int,
    delay: int = 0,
    mixing: float = 0.5,
    outer_rate: optax.ScalarOrSchedule = 0.7,
    momentum: float = 0.9,
    nesterov: bool = True,
    buckets: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Streaming DiLoCo: fragments of the parameters in turn, whose updates arrive late.

    The words of a round are the same as for :func:`diloco`, in as many messages as there are
    fragments, so a link needs a lower peak bandwidth. Fragments are runs of leaves in the order of
    the tree; the paper strides them over layers.

    Args:
      inner: the optimizer of each worker.
      axis: the mesh axis of the workers.
      every: H, steps in a round; a multiple of the fragments.
      fragments: the number of groups of leaves.
      delay: tau, steps after which an outer update arrives, less than H / F.
      mixing: alpha, the share of its own parameters that a worker goes on with.
      outer_rate: the learning rate of the outer optimizer, or a schedule of rounds.
      momentum: the momentum of the outer optimizer.
      nesterov: whether that is Nesterov's.
      buckets: into how many sums the leaves of each fragment are joined, as for :func:`diloco`.

    Returns:
      An optimizer, as :func:`diloco`.

    Example:
      >>> import optax
      >>> tx = streaming_diloco(optax.adamw(1e-3), axis="data", every=100, fragments=4, delay=5)

    References:
      Douillard et al., `Streaming DiLoCo <https://arxiv.org/abs/2501.18512>`_, 2025, Algorithm 2.
    """
    outer = _dense_outer(axis, outer_rate, momentum, nesterov, buckets)
    return local_steps(inner, outer, every=every, fragments=fragments, delay=delay, mixing=mixing)


def sparse_loco(
    inner: optax.GradientTransformation,
    *,
    density: float,
    axis: AxisName,
    every: int,
    decay: float = 0.95,
    outer_rate: optax.ScalarOrSchedule = 1.0,
    selector: Selector | None = None,
    codec: Codec | None = None,
) -> optax.GradientTransformationExtraArgs:
    """SparseLoCo: rounds of local steps, which exchange the largest changes of each chunk.

    There is no outer momentum: the residual, which decays, takes its role. An update is the sum of
    all selections over P, like the mean of DiLoCo. In the paper the values have 2 bits:
    ``codec=sparse_collectives.wire.two_bits()``.

    Args:
      inner: the optimizer of each worker.
      density: k / n of each worker's selection, in (0, 1]; 1 to 3 % in the paper.
      axis: the mesh axis of the workers.
      every: H, steps in a round; 15 to 250 in the paper.
      decay: the decay of the residual at each round.
      outer_rate: the learning rate of the outer SGD, or a schedule of rounds.
      selector: by default ``select.bucketed(density=density, bucket=4096)``.
      codec: the encoding of values; see :func:`sparse_collectives.allreduce.topk_a`.

    Returns:
      An optimizer, as :func:`diloco`.

    Example:
      >>> import optax
      >>> tx = sparse_loco(optax.adamw(1e-3), density=0.02, axis="data", every=30)

    References:
      Sarfi et al., `Communication Efficient LLM Pre-training with SparseLoCo
      <https://arxiv.org/abs/2508.15706>`_, 2025, Algorithm 1.
    """
    if selector is None:
        selector = select.bucketed(density=density, bucket=4096)
    exchange = sparse_allreduce(
        selection(density, selector),
        allreduce.topk_a(codec=codec),
        axis=axis,
        residual=residual(decay=decay),
    )
    return local_steps(inner, optax.chain(exchange, optax.sgd(outer_rate)), every=every)


def _dense_outer(
    axis: AxisName,
    rate: optax.ScalarOrSchedule,
    momentum: float,
    nesterov: bool,
    buckets: int | None,
) -> optax.GradientTransformation:
    momentum = _options.check_momentum(momentum)
    # With a momentum of 0 optax would still keep a trace of n entries.
    sgd = optax.sgd(rate, momentum or None, nesterov and bool(momentum))
    return optax.chain(dense(axis=axis, buckets=buckets), sgd)
