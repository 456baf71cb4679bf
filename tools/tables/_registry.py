"""Which table of which page is made of what."""

from collections.abc import Callable
from typing import NamedTuple

from . import (
    _advice,
    _balance,
    _choosing,
    _costs,
    _fill_in,
    _learning,
    _links,
    _predicted,
    _timed,
    _trainings,
    _words,
)
from ._pages import Found, Rows, pages, tables
from ._printed import printed


class Table(NamedTuple):
    """A table of numbers.

    Attributes:
      page: the path from the root.
      head: what its first line begins with.
      rows: makes the cells of its body.
      which: of the tables of the page with this head, from 0.
    """

    page: str
    head: str
    rows: Callable[[], Rows]
    which: int = 0


def _run(file: str, link: str) -> Callable[[], Rows]:
    return lambda: _links.of_run(file, link)


MADE = (
    Table("README.md", "| you have |", _advice.readme),
    Table("README.md", "| first step, leaves |", _costs.first_steps),
    Table("README.md", "| after 20 seconds |", _learning.over_links_short),
    Table("README.md", "| workers | 2 | 4 |", _words.shares_of_the_bound),
    Table("README.md", "| beside lax.top_k |", _costs.steps),
    Table("README.md", "| times as fast as dense |", _links.of_all_runs),
    Table(
        "docs/network.md",
        "| P = 4, n = 14.7M, 100 Mbit/s |",
        _run("network_4_third.json", "100mbit"),
    ),
    Table(
        "docs/network.md", "| P = 4, n = 14.7M, 1 Gbit/s |", _run("network_4_third.json", "1gbit")
    ),
    Table("docs/network.md", "| times as fast as dense, 1 Gbit/s |", _links.medians),
    Table("docs/network.md", "| method | step, ms | times as fast |", _links.parts),
    Table("docs/network.md", "| P = 8, n = 1M, 1 Gbit/s |", _run("network_8.json", "1gbit")),
    Table("docs/learning.md", "| | P | words | loss (deviation) |", _learning.steps),
    Table("docs/learning.md", "| | held back as a whole | in part |", _learning.limits),
    Table("docs/learning.md", "| | 100 Mbit/s: loss | steps |", _learning.over_links),
    Table(
        "docs/allreduces.md", "| P | 2 | 3 |", _words.multiples(_words.ALGORITHMS, _words.WORKERS)
    ),
    Table(
        "docs/idea.md", "| workers | 2 | 6 |", _words.multiples(_words.SHORT, _words.SHORT_WORKERS)
    ),
    Table("docs/choosing.md", "| your optimizer |", _advice.choosing),
    Table("docs/choosing.md", "| times as fast as dense |", _choosing.is_it_faster),
    Table("docs/choosing.md", "| | workers | words |", _choosing.adamw),
    Table("docs/choosing.md", "| | transformer, 100 Mbit/s |", _choosing.in_the_same_seconds),
    Table("docs/choosing.md", "| | workers | below dense |", _choosing.sgd),
    Table("docs/choosing.md", "| | speed-up | CPU ms", _choosing.short_of_cores),
    Table("docs/choosing.md", "| sharded by | link |", _choosing.sharded),
    Table("docs/choosing.md", "| your workers | exchange |", _choosing.exchanges),
    Table("docs/choosing.md", "| wish | take |", _choosing.wishes),
    Table("docs/design.md", "| n | P | m = k / P |", _words.where_the_bound_holds),
    Table("docs/wire.md", "| codec | P = 16 |", _words.by_codec),
    Table("docs/measurements.md", "| run | entries selected from |", _balance.concentrations),
    Table("docs/measurements.md", "| run | P | equal: max/mean |", _balance.split),
    Table("docs/measurements.md", "| run | regions | P | before |", _balance.allgather),
    Table("docs/measurements.md", "| P | 1 %: formula |", _fill_in.uniform),
    Table("docs/measurements.md", "| run | P | union / n, mean |", _fill_in.trainings),
    Table("docs/measurements.md", "| prediction for P = 32 |", _fill_in.predicted),
    Table(
        "docs/measurements.md",
        "| input | hashed: missing | overflow | words |",
        lambda: _balance.regions(
            "regions_recorded.json",
            workers=False,
            hashed=("missing", "overflow", "words"),
            balanced=("missing", "mass", "overflow", "words"),
        ),
    ),
    Table(
        "docs/measurements.md",
        "| input | P | hashed: missing |",
        lambda: _balance.regions("regions.json", names=_balance.INPUTS),
    ),
    Table(
        "docs/measurements.md",
        "| input | hashed: missing | overflow | wait |",
        lambda: _balance.regions(
            "regions_large.json",
            workers=False,
            names=_balance.FOUR,
            hashed=("missing", "overflow", "wait", "words"),
        ),
    ),
    Table("docs/network.md", "| | P | topk_a | gtopk |", _predicted.scaling),
    Table("docs/planner.md", "| | 1 Gbit/s: predicted |", _predicted.sharing),
    Table("docs/sharded.md", "| sharded by | link |", _timed.sites),
    Table(
        "docs/linear_models.md",
        "| logistic | epoch, s | exchange, s | epoch ratio | exchange ratio | words of a step "
        "| of dense",
        _timed.linear("linear_url.json", "logistic", _timed.EXCHANGES, words=True),
    ),
    Table(
        "docs/linear_models.md",
        "| svm | epoch, s |",
        _timed.linear("linear_url.json", "svm", _timed.EXCHANGES, words=False),
    ),
    Table("docs/partitioned_norms.md", "| | optax | P = 1 |", _timed.norms),
    Table("docs/data_cache.md", "| | epoch 1 | epoch 2 |", _timed.cache),
    Table(
        "docs/selectors.md", "| | tau' | thresholds | local: all steps |", _trainings.paper_counts
    ),
    Table("docs/selectors.md", "| selector | images: passed", _trainings.quality),
    Table("docs/selectors.md", "| rows without a selected entry |", _trainings.missing),
    Table("docs/selectors.md", "| selector | selected |", _timed.selectors),
    Table("docs/training.md", "| your optimizer |", _advice.training),
    Table("docs/training.md", "| option | state, bytes per parameter |", _costs.memory),
)


def made() -> list[tuple[Found, Rows]]:
    """Every table that is made of data, as it is and as it should be.

    Raises:
      LookupError: a table is not in its page.
    """
    pairs = []
    every = {page: tables(page) for page in pages()}

    def find(page: str, head: str, which: int, *, whole: bool = False) -> Found:
        fits = head.__eq__ if whole else lambda line: line.startswith(head)
        same = [table for table in every[page] if fits(table.head)]
        if len(same) <= which:
            raise LookupError(f"{page} has no table {which} that begins with {head!r}")
        return same[which]

    for table in MADE:
        pairs.append((find(table.page, table.head, table.which), table.rows()))
    for (page, head, which), rows in printed().items():
        pairs.append((find(page, head, which, whole=True), rows))
    return sorted(pairs, key=lambda pair: (pair[0].page, pair[0].first))


def differing() -> list[tuple[Found, Rows]]:
    """Those that differ from their data."""
    return [(table, rows) for table, rows in made() if table.rows != rows]
