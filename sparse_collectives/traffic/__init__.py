"""Counts the words that each worker receives from a program's collectives.

The meter reads a traced program (a jaxpr). Nothing is lowered or compiled, and no
device is needed: a laptop gives the volume for 1,024 workers in seconds, padding
included. The unit is the word, 4 bytes. The volume of each collective is the beta
term of the alpha-beta model in section 3 of the Ok-Topk paper
(https://arxiv.org/abs/2201.07598); `transport._dispatch` has these terms.

The meter counts the collectives that the program itself calls under `shard_map` or
`pmap`, except collectives whose results are unused. It does not see the later work
of a compiler: the collectives that the partitioner inserts for automatically sharded
arrays, and those that XLA merges, splits or removes. It does not see exchanges in
custom calls and kernels either; an exchange over MPI is an error.
"""

from sparse_collectives.traffic._meter import of_allreduce, of_function, of_traced

__all__ = [
    "of_allreduce",
    "of_function",
    "of_traced",
]
