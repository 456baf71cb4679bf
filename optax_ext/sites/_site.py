"""A site: a job of its own that exchanges its parameter changes through an object store."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from optax_ext.sites import _parameter_change, _processes
from optax_ext.sites._contents import MOST_TOKENS
from optax_ext.sites._member import Member, RoundInfo
from optax_ext.sites._objects import SITE
from optax_ext.sites._run import Run
from optax_ext.sites._store import Store
from sparse_collectives import Codec, _validation, wire

# The longest time that a program can sleep for is longer, in seconds.
_DAY = 86400.0
_NARROW8, _NARROW16 = wire.narrow8(), wire.narrow16()
# Compiled once for the sites of a process.
_messages = functools.lru_cache(maxsize=8)(_parameter_change.Messages)


class _State(NamedTuple):
    """What all processes of a site know: the next round, the shared parameters, the last round."""

    number: int
    params: np.ndarray
    last: RoundInfo | None


class Site:
    """One of a changing number of sites that train a model together, without a server.

    Each site takes steps on its own from the shared parameters, with any optimizer. After some
    steps it calls :meth:`exchange`, which puts the largest entries of its change into the store.
    The site that first creates the list of a round decides who takes part. Every site adds
    the same payloads in the same order, weighted by their tokens, so the shared parameters
    have the same bits everywhere. Entries that were not sent, or came too late, stay in the site's
    own parameters and go with a later round: nothing is lost. A site may come and go at any time.

    A site may have several processes (``jax.distributed``), with parameters that are sharded over
    them. All of them make the same calls; the first one has the store, and the others wait for it.

    Args:
      store: the location of the run: a folder, a URL such as ``s3://bucket/run`` (also ``gs://``
        and ``az://``, with the credentials that their tools use), or a store of obstore.
      name: the name of this site, which no other has: letters, digits, ``_``, ``.`` and ``-``.
      params: parameters in float32. The first site of a run begins with these. Any other begins
        with the parameters of the run, and only the shapes have to agree; see :attr:`params`.
      density: the share of the entries that a payload has, the same at all sites.
      codec: their encoding, the same at all sites; None: ``wire.narrow8()`` from 1 % on, and
        ``wire.narrow16()`` below.
      quorum: the number of payloads without which a round is not closed.
      grace: seconds to wait for the other sites of the last round, also one that came too late for
        it, once the quorum is there.
      key: a key that the sites share, to sign with; None: only damage is noticed, and the store
        decides who may write.
      snapshot_every: rounds after which the parameters are stored, for sites that come; older
        rounds are removed.
      poll: seconds from one look at the store to the next.
      give_up: seconds to wait for a store that fails, or for a round that is not closed. With
        less than ``grace``, calls have to be made again whenever a site is gone.

    Raises:
      TypeError: parameters that are not float32.
      TypeError: a store or codec of another type.
      ValueError: an invalid name, number or density, or a store that sites can't share.
      ValueError: parameters that are not finite.
      ValueError: a run of another model, density, codec or key.
      StoreError: a store that can't be opened.
      TimeoutError: a store that can't be read or written for ``give_up`` seconds.
      ImportError: obstore is not installed.

    Cost: 3 n float32 on the host, and 4 n where rounds were missed; in a round a site uploads its
    own payload, and downloads all payloads of the round. With several processes each of the others
    has n float32, gathers the parameters that are sharded, and receives 2 n from the first one.

    Example:
      >>> import tempfile, jax.numpy as jnp
      >>> from sparse_collectives import wire
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     site = Site(folder, "berlin", {"w": jnp.zeros(4)}, density=0.5, codec=wire.raw())
      ...     params = {"w": site.params["w"] + jnp.array([3.0, 1.0, -2.0, 0.0])}
      ...     params = site.exchange(params, tokens=1000, wait=True)
      ...     site.params["w"].tolist(), params["w"].tolist()
      ([3.0, 0.0, -2.0, 0.0], [3.0, 1.0, -2.0, 0.0])

    References:
      Rounds as in Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_, 2023; a quorum,
      a grace period and weights by tokens as in `Decoupled DiLoCo
      <https://arxiv.org/abs/2604.21428>`_, 2026, which has a server and no error feedback.
    """

    def __init__(
        self,
        store: str | Path | Any,
        name: str,
        params: Any,
        *,
        density: float,
        codec: Codec | None = None,
        quorum: int = 1,
        grace: float = 30.0,
        key: bytes | None = None,
        snapshot_every: int = 10,
        poll: float = 1.0,
        give_up: float = 3600.0,
    ):
        if not isinstance(name, str) or not SITE.fullmatch(name):
            raise ValueError(
                f"name must be 1 to 64 letters, digits, '_', '.' and '-', got {name!r}."
            )
        density = _validation.check_density(density)
        if codec is None:
            codec = _NARROW8 if density >= 0.01 else _NARROW16
        if not isinstance(codec, Codec):
            raise TypeError(
                f"codec must be a codec such as wire.narrow8() or wire.raw(), got {codec!r}."
            )
        quorum = _validation.check_positive_int("quorum", quorum)
        snapshot_every = _validation.check_positive_int("snapshot_every", snapshot_every)
        grace = _validation.check_number("grace", grace, 0.0, float("inf"))
        poll = _validation.check_number("poll", poll, 0.0, _DAY)
        give_up = _validation.check_number("give_up", give_up, 0.0, float("inf"))
        if key is not None and not (isinstance(key, bytes) and key):
            got = "b''" if key == b"" else f"a {type(key).__name__}"
            raise ValueError(f"key must be bytes, one or more, to sign with: encode it; got {got}.")
        self.name = name
        self._model = model = _parameter_change.model_of(params)
        messages = _messages(model.size, density, codec)
        agreed = {"density": density, "codec": str(codec.spec), "bytes": messages.bytes}
        window = {"quorum": quorum, "grace": grace, "poll": poll}
        first = model.flat(_processes.whole(params))
        if not np.isfinite(first).all():
            raise ValueError(
                "params are not finite, and a run would begin with them: begin with finite ones."
            )

        def entered() -> _State:
            run = Run(Store(store), name, model, messages, agreed, key=key, **window)
            self._member = Member(run, first, snapshot_every=snapshot_every, give_up=give_up)
            return self._known()

        self._member: Member | None = None
        self._state: _State = _processes.of_first(entered)

    @property
    def params(self) -> Any:
        """The shared parameters, with the rounds that this site has applied, to begin with."""
        return self._model.tree(self._state.params.copy())

    @property
    def last(self) -> RoundInfo | None:
        """The last round that this site applied; None before the first one."""
        return self._state.last

    @property
    def round(self) -> int:
        """The round that this site takes part in next."""
        return self._state.number

    def exchange(self, params: Any, *, tokens: int, wait: bool = False) -> Any:
        """Puts this site's change into a round, and applies the result of the last one.

        The round runs during the steps that follow, and its result is applied at the next call.

        Args:
          params: the parameters after this site's steps.
          tokens: how much it has trained on, such as examples, since the last call of this or of
            :meth:`finish` that returned; at least 1, and below 2**53.
          wait: whether to wait for this round, and apply it now.

        Returns:
          The parameters to go on with, placed as ``params`` are: the shared ones, plus the
          changes by this site that are not delivered yet.

        Raises:
          ValueError: parameters of another model, or that are not finite or further from the shared
            ones than float32 holds, of which nothing is sent.
          TimeoutError: no answer for ``give_up`` seconds. ``params`` are unchanged: call again,
            with these or after more steps.
        """
        tokens = _validation.check_positive_int("tokens", tokens, most=MOST_TOKENS - 1)
        vector = self._model.flat(_processes.whole(params))
        return self._after(lambda member: member.exchange(vector, tokens, wait), params)

    def finish(self, params: Any) -> Any:
        """Applies the round that is running, if there is one; then this site may end.

        Raises:
          ValueError: as :meth:`exchange`.
          TimeoutError: as :meth:`exchange`. If no other site is left, a ``quorum`` above 1 is never
            there; this site may then end, and its last update is lost.
        """
        vector = self._model.flat(_processes.whole(params))
        return self._after(lambda member: member.finish(vector), params)

    def close(self) -> None:
        """Waits for writes that are under way; a closed site takes part in no other round."""
        if self._member is not None:
            self._member.close()

    def _after(self, call: Callable[[Member], np.ndarray], params: Any) -> Any:
        """The parameters that the first process gets from a call, on all processes."""

        def called() -> tuple[np.ndarray, _State]:
            assert self._member is not None
            return call(self._member), self._known()

        try:
            vector, self._state = _processes.of_first(called)
        except TimeoutError:
            # It may have applied rounds before.
            self._state = _processes.of_first(self._known)
            raise
        return _processes.placed(self._model.tree(vector), params)

    def _known(self) -> _State:
        assert self._member is not None
        return _State(self._member.number, self._member.shown, self._member.last)
