"""Words that a program's collectives make each worker receive.

The meter reads a traced program (a jaxpr). Nothing is lowered or compiled and
no device is needed, so that the volume for 1024 workers comes from a laptop in
seconds, padding included. The unit is the word, 4 bytes. The volume of each
collective is the beta term of the alpha-beta model in section 3 of the
Ok-Topk paper (https://arxiv.org/abs/2201.07598); `transport._dispatch` states them.

Counted are the collectives that the program itself calls under `shard_map` or
`pmap`, except those whose results nothing uses. What a compiler does later is
not seen: the collectives that the partitioner inserts for automatically sharded
arrays, and those that XLA merges, splits or removes. Nor are exchanges in
custom calls and in kernels; one over MPI is an error.
"""

from sparse_collectives.traffic._public import of_allreduce, of_function, of_traced

__all__ = [
    "of_allreduce",
    "of_function",
    "of_traced",
]
