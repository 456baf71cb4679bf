"""Words received by the workers in a traced step of any allreduce."""

import jax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import sparse_collectives as sc
from sparse_collectives import cost_model, traffic

AXIS = "workers"

_PUBLISHED = sc.allreduce.published


def _exact(make):
    return lambda density: make()


def _full_sums(density):
    return sc.allreduce.full_sums(sc.allreduce.ok_topk(density=density))


# The factory of each algorithm, and the name in `cost_model.paper_cost` to compare it with.
ALGORITHMS = {
    "dense": (_exact(sc.allreduce.dense), "dense"),
    "dense_bucketed": (lambda density: _PUBLISHED.dense_bucketed(buckets=4), "dense"),
    "partitioned_topk": (lambda density: sc.allreduce.partitioned_topk(density=density), None),
    "partitioned_topk, few bits": (
        lambda density: sc.allreduce.partitioned_topk(density=density, bits=None),
        None,
    ),
    "partitioned_topk, few bits both ways": (
        lambda density: sc.allreduce.partitioned_topk(density=density, bits=(1, 3)),
        None,
    ),
    "topk_a": (_exact(sc.allreduce.topk_a), "topk_a"),
    "sparse_allgather": (_exact(_PUBLISHED.sparse_allgather), "topk_a"),
    "ssar_recursive_double": (_exact(_PUBLISHED.ssar_recursive_double), "ssar_recursive_double"),
    "ssar_split_allgather": (_exact(_PUBLISHED.ssar_split_allgather), "ssar_split_allgather"),
    "dsar_split_allgather": (_exact(_PUBLISHED.dsar_split_allgather), "topk_dsa"),
    "ring_sparse": (_exact(_PUBLISHED.ring_sparse), None),
    "gtopk": (lambda density: _PUBLISHED.gtopk(density=density), "gtopk"),
    "spardl": (lambda density: sc.allreduce.spardl(density=density), "spardl"),
    "ok_topk": (lambda density: sc.allreduce.ok_topk(density=density), "ok_topk"),
    "full_sums(ok_topk)": (_full_sums, None),
}
# The largest P that one is traced for: the program of a ring has a step for each worker.
_MOST = {"ring_sparse": 100}


def trace(allreduce, size, capacity, workers):
    """One step for P workers, traced without devices: read it with `traffic.of_traced`."""
    state = jax.eval_shape(lambda: allreduce.init(size, workers))
    mesh = AbstractMesh((workers,), (AXIS,), axis_types=(AxisType.Auto,))

    def step(values, indices, state):
        coo = sc.PaddedCOO(values, indices, size)
        return allreduce.reduce(coo, state, axis=AXIS)

    mapped = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    shapes = (jax.ShapeDtypeStruct((capacity,), dtype) for dtype in ("float32", "int32"))
    return jax.jit(mapped).trace(*shapes, state)


def extremes(traced):
    """Words of the best and the worst step of a program."""
    return {case: traffic.of_traced(traced, conditional=case).words for case in ("best", "worst")}


def of_algorithm(name, size, density, workers):
    """Words of the best and the worst step, and the paper's bounds; None beyond its largest P."""
    make, paper = ALGORITHMS[name]
    if workers > _MOST.get(name, 1024):
        return None
    k = max(1, round(size * density))
    traced = trace(make(density), size, k, workers)
    row = {"algorithm": name, "workers": workers, "k": k, **extremes(traced)}
    if paper is not None:
        bounds = cost_model.paper_cost(paper, cost_model.Workload(size, k, workers))
        row |= {"paper": paper, "lower": bounds.lower.words, "upper": bounds.upper.words}
    return row


def of_two_levels(size, density, nodes, inside):
    """Words that a worker receives from other nodes: HiTopKComm, 2DTAR and flat algorithms."""
    workers = nodes * inside
    axes = ("node", "device")
    top = sc.allreduce.topk_a()
    h = sc.allreduce.hierarchical(inner_axis="device", outer=top)
    shard = -(-size // inside)
    selector = sc.select.topk(density=density)

    def step(gradient):
        part = h.scatter(gradient)
        coo, _, _ = selector.select(part, selector.init(shard))
        total, *_ = h.reduce(coo, h.init(size, workers), axis=axes)
        return h.gather(total, size)

    gradient = jax.ShapeDtypeStruct((size,), "float32")
    both = traffic.of_function(step, gradient, axis=axes, axis_size=(nodes, inside)).by_scope(2)
    torus = _PUBLISHED.torus_2d()
    given = {"axis": axes, "axis_size": (nodes, inside)}
    both_dense = traffic.of_allreduce(torus, size=size, capacity=1, **given).by_scope(2)
    k = max(1, round(size * density))
    given = {"size": size, "axis_size": workers}
    flat = traffic.of_allreduce(top, capacity=k, **given).words
    dense = traffic.of_allreduce(sc.allreduce.dense(), capacity=1, **given).words
    # The share of the other workers that are in other nodes.
    outside = (workers - inside) / (workers - 1)
    return {
        "hierarchical(topk_a)": (both["hierarchical/outer"], both["hierarchical/inner"]),
        "torus_2d": (both_dense["torus_2d/outer"], both_dense["torus_2d/inner"]),
        "topk_a, flat": (flat * outside, flat * (1 - outside)),
        "dense, flat": (dense * outside, dense * (1 - outside)),
    }
