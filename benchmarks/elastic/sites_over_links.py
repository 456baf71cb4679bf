"""Sites that are jobs of their own, over slow links, compared with the rounds of one job.

    sudo python -m benchmarks.elastic.sites_over_links --rounds 100 --text FILE --json FILE

Three sites train a transformer on characters and exchange through an object store (the S3 protocol,
by moto) on a host of its own. After a third of the rounds one site leaves for good, and after half
of them a fourth one comes. Then one job of three workers takes as many steps over the same links,
with an exchange as often. Linux only, with root and iproute2 (ip, tc).
"""

import contextlib
import json
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .._common import namespaces, options, reports
from .._common.processes import ROOT, Process, environment
from .cluster import cluster

SITES, PORT = 4, 20000
LEAVES, COMES = 2, 3


@contextlib.contextmanager
def store(hosts: namespaces.Hosts, host: int) -> Iterator[dict[str, str]]:
    """An object store on a host: what a site needs in its environment."""
    address = f"http://{hosts.addresses[host]}:{PORT}"
    given = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": address,
        "AWS_ALLOW_HTTP": "true",
    }
    create = (
        "import time, boto3\n"
        "for _ in range(300):\n"
        "    try:\n"
        f"        boto3.client('s3', endpoint_url={address!r}).create_bucket(Bucket='bucket')\n"
        "        break\n"
        "    except Exception:\n"
        "        time.sleep(0.2)\n"
        'print(\'{"event": "ready"}\', flush=True)\n'
    )
    changed, env = threading.Condition(), environment() | given
    serve = ["-m", "moto.server", "-H", "0.0.0.0", "-p", str(PORT)]
    at = [*hosts.command(host), sys.executable]
    server = Process([*at, *serve], changed, env=env, cwd=ROOT)
    try:
        made = Process([*at, "-c", create], changed, env=env, cwd=ROOT)
        made.wait_for("ready", seconds=120)
        yield given
    finally:
        server.close()


def of_sites(hosts: namespaces.Hosts, args: Any) -> dict[str, Any]:
    """The rounds of three sites, of which one leaves and is followed by a fourth one."""
    changed, lives = threading.Condition(), {}
    shared = {name: getattr(args, name) for name in ("width", "rate", "seed", "density", "every")}
    shared |= {name: getattr(args, name) for name in ("examples", "rounds", "evaluate_every")}
    shared |= {"text": str(args.text) if args.text else None, "store": "s3://bucket/run"}
    shared |= {"quorum": 2, "poll": args.poll, "grace": 30.0}
    with store(hosts, SITES) as given:

        def start(number: int) -> None:
            settings = {**shared, "number": number, "name": f"site-{number}"}
            command = [*hosts.command(number), sys.executable, "-m", "benchmarks.elastic._site"]
            lives[number] = Process(
                [*command, json.dumps(settings)], changed, env=environment() | given, cwd=ROOT
            )

        def wait_for(number: int, at: int) -> None:
            def reached() -> bool:
                life = lives[number]
                said = [e for e in life.events if e.get("event") == "round" and e["number"] >= at]
                return bool(said) or any(one.ended_at is not None for one in lives.values())

            with changed:
                changed.wait_for(reached, 3600)
            for name, one in lives.items():
                if one.status:
                    raise RuntimeError(f"site {name}: {one.errors[-2000:]}")

        try:
            began = time.time()
            for number in range(SITES - 1):
                start(number)
            wait_for(0, args.rounds // 3)
            lives[LEAVES].signal(signal.SIGTERM)
            wait_for(0, args.rounds // 2)
            start(COMES)
            for number in (0, 1, COMES):
                if not lives[number].wait_for_end(3600) or lives[number].status:
                    raise RuntimeError(f"site {number}: {lives[number].errors[-2000:]}")
        finally:
            for life in lives.values():
                life.close()
    return _report(lives, began)


def _report(lives: dict[int, Process], began: float) -> dict[str, Any]:
    events = {number: life.events for number, life in lives.items()}
    rounds = [e for said in events.values() for e in said if e.get("event") == "round"]
    by_number: dict[int, set[tuple[str, ...]]] = {}
    for event in rounds:
        by_number.setdefault(event["number"], set()).add(tuple(event["sites"]))
    ends = [e for said in events.values() for e in said if e.get("event") == "done"]
    # The first rounds compile.
    steady = [e for e in rounds if e["number"] > 2]
    return {
        "rounds": max(by_number) + 1,
        "sites": {str(number): sorted(map(list, found)) for number, found in by_number.items()},
        "differ": sum(len(found) > 1 for found in by_number.values()),
        "seconds of a round": statistics.median(e["seconds"] for e in steady),
        "seconds of its steps": statistics.median(e["steps"] for e in steady),
        "seconds waited": statistics.median(e["waited"] for e in steady),
        "kB sent": statistics.median(e["sent"] for e in steady) / 1e3,
        "kB received": statistics.median(e["received"] for e in steady) / 1e3,
        "joined": [e for e in events[COMES] if e.get("event") == "joined"],
        "not delivered": sum(not e["delivered"] for e in steady),
        "values": [
            [e["time"] - began, e["round"], e["value"]]
            for e in events[0]
            if e.get("event") in ("value", "done")
        ],
        "ends": [[e["round"], e["value"]] for e in ends],
    }


def of_one_job(hosts: namespaces.Hosts, rounds: int, args: Any) -> dict[str, Any]:
    """As many steps of three workers of one job, with an exchange as often."""
    settings = {name: getattr(args, name) for name in ("width", "rate", "seed", "examples")}
    settings |= {"text": str(args.text) if args.text else None, "min_workers": SITES - 1}
    settings |= {"heartbeat": 30, "collective": 30, "folder": None, "save_every": None}
    settings |= {"steps": rounds * args.every, "evaluate_every": args.evaluate_every * args.every}
    settings |= {"density": args.density, "every": args.every}
    with cluster("benchmarks.elastic._worker", SITES - 1, hosts, **settings) as of:
        of.wait_for("the end", lambda: not of.living, 3600)
        steps = sorted(of.events("step"), key=lambda event: event["time"])
        values = sorted(of.events("value"), key=lambda event: event["time"])
    times = {event["step"]: event["time"] for event in steps}
    of_round = [
        times[step] - times[step - args.every]
        for step in times
        if step % args.every == 0 and step > 2 * args.every
    ]
    return {
        "rounds": rounds,
        "seconds of a round": statistics.median(of_round),
        "kB received": values[-1]["bytes"] / 1e3,
        "values": [[e["time"] - steps[0]["time"], e["step"], e["value"]] for e in values],
    }


def _line(found: dict[str, Any]) -> str:
    """A training in a few numbers, and the last point of its curve."""
    few = {name: value for name, value in found.items() if name not in ("sites", "joined")}
    return json.dumps({**few, "values": found["values"][-1]})


@options.program
def main(argv: list[str] | None = None) -> None:
    """Runs both, and prints what a round took."""
    parser = options.parser_of(__doc__)
    numbers = {"rounds": 60, "every": 30, "width": 96, "examples": 8, "seed": 0}
    numbers |= {"evaluate-every": 5}
    for name, default in numbers.items():
        parser.add_argument(
            f"--{name}", type=options.at_least_one if default else int, default=default
        )
    for name, value in {"rate": 0.005, "density": 0.05, "poll": 0.2}.items():
        parser.add_argument(f"--{name}", type=float, default=value)
    parser.add_argument("--link", type=options.link, default="20mbit+100ms", help="of each site")
    parser.add_argument("--text", type=Path, help="a text; by default Python's help topics")
    parser.add_argument("--json", type=options.output, help="write the results here")
    args = parser.parse_args(argv)
    if args.rounds < args.evaluate_every:
        parser.error(f"--rounds {args.rounds} is less than --evaluate-every {args.evaluate_every}")
    options.require_network()
    with namespaces.network(SITES + 1) as hosts:
        hosts.limit(args.link)
        found: dict[str, Any] = {"link": args.link, "cores": os.cpu_count()}
        found |= {name: getattr(args, name) for name in ("rounds", "every", "width", "examples")}
        found |= {name: getattr(args, name) for name in ("density", "rate", "seed")}
        found["sites"] = of_sites(hosts, args)
        reports.write(args.json, found)
        print(_line(found["sites"]), flush=True)
        found["one job"] = of_one_job(hosts, found["sites"]["rounds"], args)
        reports.write(args.json, found)
        print(_line(found["one job"]), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
