"""The transport that an axis gets, and the error without MPI; these tests need no MPI."""

import functools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_ext
import sparse_collectives as sc
from sparse_collectives import _axes, _varying, transport


class Comm:
    """A communicator that is not hashable, as in mpi4py."""

    __hash__ = None  # type: ignore[assignment]
    Get_size, Get_rank = (lambda self: 4), (lambda self: 1)

    def __eq__(self, other):
        return self is other


class Intracomm(Comm):
    pass


@pytest.fixture
def comm(monkeypatch):
    """A communicator of an mpi4py without mpi4jax."""
    module = types.ModuleType("mpi4py.MPI")
    vars(module).update(Comm=Comm, Intracomm=Intracomm, COMM_NULL=Intracomm())
    package = types.ModuleType("mpi4py")
    vars(package).update(MPI=module)
    for name, value in (("mpi4py", package), ("mpi4py.MPI", module), ("mpi4jax", None)):
        monkeypatch.setitem(sys.modules, name, value)
    return Intracomm()


COO = sc.PaddedCOO(np.ones(2, np.float32), np.arange(2, dtype=np.int32), 4)
OF_AN_ARRAY = ("psum", "pmean", "all_gather", "all_to_all", "psum_scatter")
FUNCTIONS = {
    "axis_size": transport.axis_size,
    **{x: functools.partial(getattr(transport, x), np.ones(4, np.float32)) for x in OF_AN_ARRAY},
    "ppermute": lambda axis: transport.ppermute(jnp.ones(4), axis, [(1, 2)]),
    "allreduce": lambda axis: sc.allreduce.dense().reduce(COO, (), axis=axis),
    "init": lambda axis: optax_ext.ok_topk(0.5, axis=axis).init(jnp.zeros(4)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_communicator_without_mpi4jax_says_what_to_install(name, comm):
    with pytest.raises(ImportError, match=r"pip install 'sparse-collectives\[mpi\]'"):
        FUNCTIONS[name](comm)


def test_communicator_is_an_axis_that_is_bound_and_has_no_types(comm):
    assert _axes.is_communicator(comm)
    assert _axes.is_communicator((comm, comm))
    assert _axes.axis_is_bound(comm)
    assert not _varying.checks_varying(comm)
    assert not _varying.is_varying(jnp.ones(2), comm)
    x = {"a": jnp.ones(2)}
    assert _varying.to_varying(x, comm)["a"] is x["a"]
    assert transport.holds_on_mesh(x["a"], comm) is x["a"]
    assert int(transport.axis_index((comm, comm))) == 5
    # Its stand-in in a state is hashable and records the number of ranks.
    assert _axes.static_axis(comm) == _axes.static_axis(Intracomm())
    assert hash(_axes.static_axis((comm, comm))) == hash((_axes.Ranks(4), _axes.Ranks(4)))
    assert _axes.ranks(_axes.static_axis((comm, comm))) == 16


def test_names_are_axes_of_a_mesh_and_ask_for_no_mpi(comm):
    for axis in ("w", ("node", "device")):
        assert not _axes.is_communicator(axis)
        assert _axes.static_axis(axis) is axis
        assert _axes.ranks(axis) == 0
    total = jax.vmap(lambda x: transport.pmean(x, "w"), axis_name="w")(jnp.arange(4.0))
    assert total.tolist() == [1.5] * 4
