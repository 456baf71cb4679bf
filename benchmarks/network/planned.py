"""The predicted step of each allreduce, in its fastest encoding, over the number of workers.

    python -m benchmarks.network.planned --params 133M --bandwidth 25Gbit --plot plan.png

`python -m sparse_collectives plan` makes the same predictions.
"""

from sparse_collectives import _units, cost_model, planner
from sparse_collectives.planner._ways import CPU, GPU

from .._common import display, options, reports
from .._common.options import InputError


@options.program
def main(argv: list[str] | None = None) -> None:
    """Predicts, prints, and writes the requested files."""
    usual = {"density": 0.01, "workers": [2**i for i in range(1, 11)]}
    parser = options.parser_of(__doc__, "json", "plot", **usual)
    add = parser.add_argument
    add("--params", default="14.7M", metavar="N")
    add("--latency", default="100us", metavar="T")
    add("--bandwidth", default="1Gbit", metavar="B")
    add("--compute", default="0s", metavar="T", help="forward and backward pass of a worker")
    add("--select-cost", default="cpu", choices=("cpu", "gpu"))
    args = parser.parse_args(argv)
    try:
        size, compute = (
            _units.count("--params", args.params),
            _units.seconds("--compute", args.compute),
        )
        network = cost_model.network(args.latency, args.bandwidth)
    except ValueError as error:
        raise InputError(str(error)) from error
    selected, local = max(1, round(args.density * size)), CPU if args.select_cost == "cpu" else GPU
    rows = []
    for workers in args.workers:
        load = cost_model.Workload(size, selected, workers)
        plan = planner.plan(load, network, local=local, compute=compute)
        # The first of an algorithm is its fastest encoding.
        fastest = {row.name: row for row in reversed(plan.predictions)}
        rows += [
            {"algorithm": name, "workers": workers, "codec": row.codec, "step": 1e3 * row.step}
            for name, row in fastest.items()
        ]
    title = f"n = {size:,}, density {args.density:g}, latency {args.latency}, {args.bandwidth}"
    display.show_crossed(
        f"ms a step: {title}", rows, "algorithm", "workers", lambda row: f"{row['step']:,.1f}"
    )
    reports.write(args.json, rows)
    lines = display.lines_of(rows, "algorithm", "workers", "step")
    panel = {"lines": lines, "workers": True, "xlabel": "workers P", "ylabel": "ms a step"}
    display.draw(args.plot, [panel], title=title)


if __name__ == "__main__":
    raise SystemExit(main())
