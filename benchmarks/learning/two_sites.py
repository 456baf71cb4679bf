"""Two sites with few examples each, together and alone: examples/two_sites.py.

    python -m benchmarks.learning.two_sites [--seeds 3] [--json FILE]

The result of each round is the accuracy on images that no site trains on.
"""

import re
import statistics
import subprocess
import sys
import tempfile

from .._common import display, options, reports
from .._common.processes import ROOT

SITES = ("berlin", "paris")
_LINE = re.compile(r"round \d+ of .*: accuracy ([\d.]+)$", re.MULTILINE)


def accuracies(seed: int, *, alone: bool) -> dict[str, list[float]]:
    """The accuracy of each site by round."""
    program, more = ROOT / "examples" / "two_sites.py", ["--alone"] if alone else []
    with tempfile.TemporaryDirectory() as folder:
        running = {
            name: subprocess.Popen(
                [sys.executable, program, f"{folder}/{name if alone else 'store'}", name]
                + [f"--seed={seed}", *more],
                stdout=subprocess.PIPE,
                text=True,
            )
            for name in SITES
        }
        printed = {name: process.communicate()[0] for name, process in running.items()}
        if any(process.returncode for process in running.values()):
            raise RuntimeError("a site has failed")
    return {name: [float(x) for x in _LINE.findall(text)] for name, text in printed.items()}


@options.program
def main(argv: list[str] | None = None) -> None:
    """Runs the sites, and prints a table."""
    args = options.parser_of(__doc__, "json", seeds=3).parse_args(argv)
    rows = []
    for alone in (False, True):
        for seed in range(args.seeds):
            options.say(f"{'alone' if alone else 'together'}, seed {seed}")
            for name, found in accuracies(seed, alone=alone).items():
                rows.append({"site": name, "alone": alone, "seed": seed, "accuracy": found})
    reports.write(args.json, {"rows": rows})
    last = [
        {
            "alone": alone,
            "last accuracy": statistics.mean(
                r["accuracy"][-1] for r in rows if r["alone"] == alone
            ),
        }
        for alone in (False, True)
    ]
    display.show_rows("mean of both sites and all seeds", last)


if __name__ == "__main__":
    raise SystemExit(main())
