"""Steps of GPTs on hosts with GPUs: measured arithmetic of one GPU, and a model of the network."""

import json
from collections.abc import Iterator
from typing import NamedTuple

from sparse_collectives import cost_model
from sparse_collectives.cost_model._costs import Network
from sparse_collectives.planner._optimizers import optimizers
from sparse_collectives.planner._ways import GPU, Prediction, predict_step

from .._common.processes import ROOT

# A message of NCCL between two hosts: 6.6 us, and 5 us for the hop over the network.
LATENCY = 11.6e-6
SIZES = {"124M": 124_439_808, "1.3B": 1_300_000_000, "7B": 7_000_000_000}
# The rate of a host's card, which its GPUs share.
GBITS = (1, 10, 25, 100, 200, 400)
HOSTS, GPUS = (2, 64), (1, 8)
DENSITY = 0.05
# For each name here the planner's name and messages, and the measured step.
WAYS = {
    "dense": ("dense, adamw", "float32", "dense, AdamW"),
    "dense, overlapped": ("dense_bucketed, adamw", "float32", "dense, AdamW"),
    "dense, float16, overlapped": ("dense, adamw", "float16", "dense, AdamW"),
    "sparse_adamw": ("sparse_adamw", "few bits", "sparse_adamw"),
    "powersgd(1)": ("powersgd(1), adamw", "factors", "powersgd(1), AdamW"),
}
_ALONE = "AdamW alone"


class Case(NamedTuple):
    """A model on some hosts: the GPUs of a host share the parameters, and the host's card."""

    model: str
    hosts: int
    gpus: int
    gbit: float


def _measured() -> tuple[dict[str, float], int]:
    """Seconds of a step of each optimizer on one GPU, and the parameters of the model."""
    timed = json.loads((ROOT / "docs/data/gpu_train_step.json").read_text(encoding="utf-8"))
    steps = {row["contestant"]: 1e-3 * row["median_ms"] for row in timed["rows"]}
    return steps, timed["parameters"]


def step(size: int, hosts: int, gpus: int, network: Network) -> dict[str, Prediction]:
    """The predicted steps by name; ``network`` is of one GPU while all of its host communicate.

    A host is one worker. Each of its GPUs has a part of the parameters, and exchanges it with the
    GPUs of the other hosts that have the same part. The traffic inside of a host is left out. A
    GPU computes in proportion to the parameters, and the work of an optimizer to its part.
    """
    steps, measured = _measured()
    part = -(-size // gpus)
    load = cost_model.Workload(part, max(1, round(DENSITY * part)), hosts)
    ways = {(way.name, way.codec): way for way in optimizers(load, GPU)}
    computing, found = steps[_ALONE] * size / measured, {}
    for name, (planned, codec, contestant) in WAYS.items():
        more = (steps[contestant] - steps[_ALONE]) * part / measured
        found[name] = predict_step(ways[planned, codec]._replace(local=more), network, computing)
    return found


def cases() -> Iterator[tuple[Case, dict[str, Prediction]]]:
    """All cases but 7B on hosts of one GPU, whose parameters and moments take 112 GB."""
    for model, size in SIZES.items():
        for gpus in GPUS:
            for hosts in HOSTS:
                for gbit in GBITS:
                    if (model, gpus) != ("7B", 1):
                        network = cost_model.network(LATENCY, f"{gbit / gpus}Gbit")
                        yield Case(model, hosts, gpus, gbit), step(size, hosts, gpus, network)
