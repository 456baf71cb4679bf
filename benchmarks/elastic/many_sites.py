"""Times a round through an object store, with many sites on this machine.

    python -m benchmarks.elastic.many_sites --sites 4 16 64 --params 1000000

Each site is a thread with its own parameters, and all use one folder. Every site reads the
payloads of all others, so the bytes of a round grow with the number of sites, and on one machine
its seconds grow with the square of that number.
"""

import argparse
import concurrent.futures
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from optax_ext import sites

from .._common import display, options, reports


def rounds(count: int, size: int, density: float, times: int, folder: str) -> dict[str, Any]:
    """Seconds of a round of so many sites, and the bytes that a site receives in it."""
    params = {"w": np.zeros(size, np.float32)}
    each = [
        sites.Site(folder, f"site-{i:03d}", params, density=density, quorum=count, poll=0.05)
        for i in range(count)
    ]
    rng = np.random.default_rng(0)
    moved = {"w": rng.standard_normal(size).astype(np.float32)}
    at = [moved] * count
    seconds = []
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        for _ in range(times + 1):
            began = time.perf_counter()
            calls = [
                pool.submit(site.exchange, here, tokens=1, wait=True)
                for site, here in zip(each, at, strict=True)
            ]
            at = [call.result() for call in calls]
            seconds.append(time.perf_counter() - began)
    last = each[0].last
    assert last is not None
    assert len(last.sites) == count
    digests = {site.params["w"].tobytes() for site in each}
    for site in each:
        site.close()
    return {
        "sites": count,
        "parameters": size,
        "seconds": statistics.median(seconds[1:]),
        "seconds, worst": max(seconds[1:]),
        "MB received": last.received / 1e6,
        "MB sent": last.sent / 1e6,
        "same bits": len(digests) == 1,
    }


@options.program
def main(argv: list[str] | None = None) -> None:
    """Runs the rounds, and prints a line for each number of sites."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sites", type=int, nargs="+", default=[4, 16, 64], help="how many")
    parser.add_argument("--params", type=int, default=1_000_000, help="n")
    parser.add_argument("--density", type=float, default=0.05, help="of a payload")
    parser.add_argument("--rounds", type=int, default=3, help="of which the median is shown")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args(argv)
    rows = []
    for count in args.sites:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(rounds(count, args.params, args.density, args.rounds, folder))
    display.show_rows("a round through a folder", rows)
    reports.write(args.json, rows)


if __name__ == "__main__":
    raise SystemExit(main())
