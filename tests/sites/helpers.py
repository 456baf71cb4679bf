"""Sites of the tests, in threads of one process and over a store in memory."""

import concurrent.futures
import threading
from typing import Any

import jax.numpy as jnp
import numpy as np
import obstore.store

from optax_ext import sites
from optax_ext.sites._objects import Name
from sparse_collectives import wire

SIZE = 60
PARAMS = {"a": np.zeros((SIZE // 2, 1), np.float32), "b": np.ones(SIZE // 2, np.float32)}


RAW = wire.raw()


def memory() -> Any:
    """A store of this caller alone."""
    return obstore.store.MemoryStore()


def site(store: Any, name: str = "a", params: Any = PARAMS, **options: Any) -> sites.Site:
    """A site that never waits for long, whose messages are exact."""
    given = {"density": 0.1, "codec": RAW, "poll": 0.005, "grace": 0.2, "give_up": 30.0}
    return sites.Site(store, name, params, **{**given, **options})


def moved(params: Any, step: int, number: int = 0) -> Any:
    """Parameters after some steps, all of which are whole numbers."""
    rng = np.random.default_rng([step, number])
    a = rng.integers(-8, 9, (SIZE // 2, 1)).astype(np.float32)
    b = rng.integers(-8, 9, SIZE // 2).astype(np.float32)
    return {"a": jnp.asarray(params["a"] + a), "b": params["b"] + b}


def flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.asarray(tree[name]).ravel() for name in sorted(tree)])


def together(*calls: Any) -> list[Any]:
    """The results of functions that run at the same time, each in a thread."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def stored(of: sites.Site) -> None:
    """Waits until the snapshots of a site are stored."""
    of._member._snapshots.submit(int).result()


def slow_payloads(of: sites.Site) -> tuple[threading.Event, threading.Event]:
    """Events: a payload of the site is on its way, and it may arrive, which the caller sets."""
    begins, arrives = threading.Event(), threading.Event()
    store = of._member._run.store
    create = store.create

    def slow(name: str, data: bytes) -> bool:
        if "payload" in name:
            begins.set()
            # A test that fails before it sets the event ends too.
            arrives.wait(60)
        return create(name, data)

    store.create = slow
    return begins, arrives


def catch_up(of: sites.Site) -> None:
    """Applies the rounds that others have closed, without taking part in one."""
    member = of._member
    member._apply(member._run.look(member.number), np.zeros(SIZE, np.float32), 0.0)
    member.shown = member.params.copy()
    of._state = of._known()


def waiting(of: sites.Site) -> set[str]:
    """The sites whose payloads are in the round that a site takes part in next."""
    run = of._member._run
    found = run._objects.names(Name("list", of.round).folder)
    return {name.site for name in run._arrived(found)}


def delivered(of: sites.Site, rounds: int, first: int = 0) -> np.ndarray:
    """The sum of a site's deliveries in the first rounds, read from the store."""
    total = np.zeros(SIZE, np.float64)
    for number in range(first, rounds):
        for share in of._member._run.closed(number):
            if share.site == of.name:
                total[share.change.indices] += share.change.values
    return total
