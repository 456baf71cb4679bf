"""Arguments, parameters and runs that a site refuses."""

import functools

import jax
import numpy as np
import pytest

from sparse_collectives import wire
from tests.sites.helpers import PARAMS, SIZE, memory, moved, site


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "a/b"}, "name must be 1 to 64 letters"),
        ({"name": ""}, "name must be"),
        ({"quorum": 0}, "quorum must be an integer of at least 1, got 0"),
        ({"snapshot_every": 1.5}, "snapshot_every must be an integer"),
        ({"grace": -1.0}, r"grace must be a number in \[0.0, inf\], got -1.0"),
        ({"key": "word"}, "key must be bytes, one or more, to sign with: encode it; got a str"),
        ({"key": b""}, "key must be bytes, one or more, .*; got b''"),
        ({"params": {}}, "params have no entries, got {}"),
        ({"density": 0.0}, "density"),
        ({"params": {"w": np.array([1, np.nan], np.float32)}}, "params are not finite, and a run"),
        ({"grace": "5"}, "grace must be a number"),
        ({"give_up": float("nan")}, "give_up must be a number"),
        ({"poll": float("inf")}, "poll must be a number"),
        ({"quorum": True}, "quorum must be an integer"),
    ],
)
def test_arguments_that_are_none(options, message):
    with pytest.raises(ValueError, match=message):
        site(memory(), **options)


def test_a_run_of_something_else_is_refused():
    store = memory()
    site(store)
    for options, message in [
        ({"density": 0.2}, "has density 0.1, and this site 0.2"),
        ({"codec": wire.narrow16()}, "has codec 'raw.*', and this site 'narrow16"),
        ({"params": {"c": np.zeros(4, np.float32)}}, "has model .*, and this site"),
        ({"key": b"secret"}, "its signature is not that of the key"),
    ]:
        with pytest.raises(ValueError, match=message):
            site(store, "b", **options)
    assert [*site(store)._member._run.store.sizes("snapshot")] == ["snapshot/00000000"]


def test_parameters_that_are_none():
    with pytest.raises(TypeError, match=r"params\['a'\] is bfloat16: sites exchange.*float32"):
        site(memory(), params={"a": jax.numpy.zeros(3, "bfloat16")})
    one = site(memory())
    with pytest.raises(ValueError, match=r"another model: 3 entries.*params\['a'\] is"):
        one.exchange({"a": np.zeros(3, np.float32)}, tokens=1)
    with pytest.raises(ValueError, match="tokens must be .*write int or float around an array"):
        one.exchange(PARAMS, tokens=jax.numpy.int32(4))
    bad = moved(PARAMS, 0)
    bad["b"][3] = np.nan
    with pytest.raises(ValueError, match="params are not finite, and nothing was sent"):
        one.exchange(bad, tokens=1)
    for tokens in (0, 1.5, True):
        with pytest.raises(ValueError, match="tokens must be an integer of at least 1"):
            one.exchange(PARAMS, tokens=tokens)
    assert not one._member._run.store.sizes("round")


def test_a_change_that_float32_can_not_hold_is_an_error_at_once():
    store = memory()
    one = site(store, params={"w": np.full(SIZE, -3e38, np.float32)})
    large = {"w": np.full(SIZE, 3e38, np.float32)}
    for call in (functools.partial(one.exchange, tokens=1), one.finish):
        with pytest.raises(ValueError, match="params are further from those of all sites than"):
            call(large)
    assert not one._member._run.store.sizes("round")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codec": "raw"}, r"codec must be a codec such as wire.narrow8\(\).*, got 'raw'"),
        ({"density": "0.1"}, "density must be a number"),
        ({"params": {"w": "x"}}, r"params\['w'\] is 'x': sites exchange arrays of float32"),
        ({"store": 5}, "store must be a folder, a URL such as"),
    ],
)
def test_arguments_of_another_type(options, message):
    with pytest.raises(TypeError, match=message):
        site(**{"store": memory(), **options})


def test_a_closed_site_takes_part_in_no_round():
    one = site(memory())
    one.close()
    with pytest.raises(ValueError, match="this site is closed.*of the same name"):
        one.exchange(PARAMS, tokens=1)
