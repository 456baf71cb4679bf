"""Sites in any order of calls, over a store that fails at any moment: nothing is lost or doubled.

The store may fail before it does something, or after it has done it, a write may take so long that
others remove its round, and a wait may be interrupted. A call that fails is made again, as the docs
say, with the same parameters or after more steps. A copy of all objects has the delivered entries,
also in rounds that are removed.
"""

import contextlib
import threading

import numpy as np
import pytest

from optax_ext import sites
from tests.sites.helpers import PARAMS, SIZE, flat, memory, moved, site

NAMES = "abc"


class Failing:
    """The store of one site, which fails in a share of the operations."""

    def __init__(self, store, copy, rng):
        self._store, self._copy, self._rng = store, copy, rng
        self.fails = 0.0
        self.open = threading.Event()
        self.open.set()
        self.operations = store.create, store.get, store.sizes
        store.create, store.get, store.sizes = self.create, self.get, self.sizes

    def create(self, name, data):
        if "payload" in name:
            # A test that fails before it opens the store ends too.
            self.open.wait(60)
        with self._sometimes():
            created = self.operations[0](name, data)
            if created:
                # A payload that comes after its round was removed may close that a second time.
                self._copy.setdefault(name, data)
        return created

    def get(self, *given):
        with self._sometimes():
            found = self.operations[1](*given)
        return found

    def sizes(self, folder):
        with self._sometimes():
            found = self.operations[2](folder)
        return found

    @contextlib.contextmanager
    def _sometimes(self):
        before, after = self._rng.random(2) < self.fails / 2
        if before:
            raise sites.StoreError("can't be reached")
        yield
        if after:
            raise sites.StoreError("can't be reached any more")


class Interrupted:
    """The thread of a site's rounds, or a round of it, for which the caller may stop waiting."""

    def __init__(self, around, player):
        self._around, self._player = around, player

    def submit(self, function, *given):
        return Interrupted(self._around.submit(function, *given), self._player)

    def result(self):
        if self._player.rng.random() < self._player.store.fails / 2:
            raise KeyboardInterrupt
        return self._around.result()

    def shutdown(self):
        self._around.shutdown()


class Player:
    """A site, its parameters, and what it has moved in this life."""

    def __init__(self, store, copy, name, rng, **options):
        self.rng, self.steps = rng, 0
        self.site = site(store, name, give_up=0.0, **options)
        self.run = self.site._member._run
        self.store = Failing(self.run.store, copy, rng)
        self.site._member._pool = Interrupted(self.site._member._pool, self)
        self.params = self.site.params
        self.total = np.zeros(SIZE)
        self.tokens = 0

    def move(self):
        """A step of whole numbers, whose sums are exact in this test."""
        before = flat(self.params)
        self.params = moved(self.params, self.steps, NAMES.index(self.site.name))
        self.steps += 1
        self.total += flat(self.params) - before

    def call(self, function):
        """The call, again until it succeeds, with more and more of the store at work."""
        for turn in range(100):
            self.store.fails = max(0.0, 0.3 - 0.01 * turn)
            try:
                self.params = function(self.params)
                return
            except (TimeoutError, KeyboardInterrupt):
                if self.rng.random() < 0.3:
                    self.move()
            finally:
                self.store.fails = 0.0
        raise AssertionError("no call succeeds")

    def exchange(self, wait):
        tokens = int(self.rng.integers(1, 5))
        self.tokens += tokens
        self.call(lambda params: self.site.exchange(params, tokens=tokens, wait=wait))

    def try_and_finish(self, wait):
        """A call that may fail, before one that returns, after which it is not made again."""
        tokens = int(self.rng.integers(1, 5))
        self.tokens += tokens
        self.store.fails = 0.3
        with contextlib.suppress(TimeoutError, KeyboardInterrupt):
            self.params = self.site.exchange(self.params, tokens=tokens, wait=wait)
        self.call(self.site.finish)


def delivered(run, life, rounds):
    """The sums of the entries and of the tokens of a life in the closed rounds."""
    total, tokens = np.zeros(SIZE), 0
    for shares in rounds:
        for share in shares:
            if share.life == life:
                total[share.change.indices] += share.change.values
                tokens += share.tokens
    return total, tokens


def check(players, copy, initial):
    """All that a site has moved was delivered or waits; all have the parameters of the rounds."""
    whole = memory()
    reader = site(whole, "reader", **players[0][1])
    for name in (*reader._member._run.store.sizes(""),):
        reader._member._run.store.delete([name])
    for name, data in copy.items():
        assert reader._member._run.store.create(name, data)
    run = reader._member._run
    run._objects.run = players[0][0].run._objects.run
    rounds = []
    while shares := run.closed(len(rounds)):
        rounds.append(shares)
    at = [(player.site.round, flat(player.site.params).tobytes()) for player, _ in players]
    for number, params in at:
        assert all(params == other for n, other in at if n == number)
    for player, _ in players:
        waits = flat(player.params) - flat(player.site.params)
        mine, tokens = delivered(run, player.run.life, rounds[: player.site.round])
        assert tokens + player.site._member._unsent == player.tokens
        np.testing.assert_allclose(mine + waits, player.total, atol=1e-3)
    shared = flat(initial).astype(np.float64)
    for shares in rounds:
        assert all(share.tokens > 0 for share in shares)
        for share in shares:
            weight = share.tokens / sum(x.tokens for x in shares)
            shared[share.change.indices] += share.change.values * weight
    newest = max(players, key=lambda x: x[0].site.round)[0]
    assert newest.site.round == len(rounds)
    np.testing.assert_allclose(flat(newest.site.params), shared, atol=1e-3)


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_lost_or_doubled(seed, monkeypatch):
    monkeypatch.setattr("optax_ext.sites._member._AGAIN", 0.0)
    rng = np.random.default_rng(seed)
    store, copy = memory(), {}
    options = {"density": (0.1, 1.0)[seed % 2], "grace": 0.0, "poll": 0.001}
    options["snapshot_every"] = (1000, 2, 3)[seed % 3]
    players = [Player(store, copy, name, rng, **options) for name in NAMES[: 2 + seed % 2]]
    for name in players[0].run.store.sizes(""):
        copy[name] = players[0].store.operations[1](name, 10**6)
    slow = None
    for _ in range(25):
        if slow is not None and rng.random() < 0.3:
            slow.store.open.set()
            slow = None
        player = players[rng.integers(len(players))]
        if player is slow:
            continue
        player.move()
        if slow is None and rng.random() < 0.2:
            # Its next payload comes late.
            player.call(player.site.finish)
            player.store.open.clear()
            player.exchange(wait=False)
            slow = player
            continue
        if rng.random() < 0.2:
            player.call(player.site.finish)
        else:
            call = player.try_and_finish if rng.random() < 0.3 else player.exchange
            call(wait=bool(rng.random() < 0.5))
    for player in players:
        player.store.open.set()
        player.call(player.site.finish)
    for player in players:
        # Without a step of its own, so that all apply the rounds of the others.
        player.exchange(wait=True)
        player.site.close()
    check([(player, options) for player in players], copy, PARAMS)
