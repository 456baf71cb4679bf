"""Thousands of steps over several processes, with data that are hard for a sparse allreduce.

The processes train over jax.distributed and Gloo on one machine. Their gradients are the hard
accumulators of the other tests, each for a few steps, and move on. In 4 % of the steps there are
entries that are not finite, which skip the step or, in 20 % of the steps, are left out. The
state is saved at intervals, and the processes start again from a checkpoint. The test checks:

- conservation, at every step: accumulated entries are delivered or kept. The largest difference at
  any entry is at most 2P + 4 float32 roundings of that entry.
- replicas: the parameters have the same bits in every process, and are finite.
- counts: the gradients determine the steps taken and skipped and the entries dropped.
- memory: once a start has compiled both steps and written a checkpoint, the resident memory grows
  by no more than 16 MiB until the next start, and the number of mapped pieces of memory by no more
  than 64. Medians of the first and the last 10 % of at least 20 reports are compared.

The default run is short; this is the long one:

    $ SOAK_STEPS=10000 SOAK_PROCESSES=4 SOAK_REPORT_EVERY=50 \\
        python -m pytest tests/system/test_soak.py -m slow -s
"""

import os
import statistics
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_ext
from examples.deadline import deadline
from tests import groups
from tests.groups import say
from tests.sparse_collectives.helpers import hard_accumulators
from tests.system import _task

# Environment variables have these names after SOAK_; restarts are evenly spread checkpoints.
SETTINGS = {"steps": 120, "processes": 2, "restarts": 1, "save_every": 500, "report_every": 5}
# MiB, and pieces of memory.
MOST_GROWTH = {"rss": 16.0, "maps": 64}


def segment(folder, first, last, expected, settings):
    """The reports of each process, from its start at step ``first`` to its end at ``last``."""
    given = {name: settings[name] for name in ("save_every", "report_every", "processes")}
    given |= {"folder": str(folder / "checkpoints"), "first": first, "last": last}
    # The deadline is for a single step; the first one compiles and has a longer one.
    given |= {"deadline": 120, "expected": expected}
    with groups.group("tests.system.test_soak", **given) as group:
        # Each process watches its own steps, so there is no deadline for all of them.
        for process in group:
            process.wait_for("finished", seconds=1e6)
        return [[x for x in process.events if x["event"] == "report"] for process in group]


def growth(samples):
    """The growth from the median of the first 10 % to the median of the last; 0 for few samples."""
    if len(samples) < 20:
        return 0
    tenth = len(samples) // 10
    return statistics.median(samples[-tenth:]) - statistics.median(samples[:tenth])


def check(processes):
    """Checks each process's reports from one start on; each process checks the rest alone."""
    for number, reports in enumerate(processes):
        for name, most in MOST_GROWTH.items():
            more = growth([report[name] for report in reports if report["settled"]])
            print(f"process {number}: {name} grew by {more:.1f}")
            assert more <= most, f"{name} grew"
    for same_step in zip(*processes, strict=True):
        assert len({report["params"] for report in same_step}) == 1, "replicas differ"


def test_soak_sees_other_replicas_and_more_memory():
    usual = {"settled": True, "rss": 300.0, "maps": 2000}
    good = [usual | {"params": step} for step in range(30)]
    check([good, good])
    for name, value in {"params": 7, "rss": 317.0, "maps": 2065}.items():
        bad = good[:25] + [report | {name: value} for report in good[25:]]
        with pytest.raises(AssertionError, match="replicas differ" if name == "params" else name):
            check([good, bad])


@pytest.mark.slow
@pytest.mark.usefixtures("default_promotion")
def test_soak_finds_no_violation(tmp_path):
    read = os.environ.get
    settings = {name: int(read(f"SOAK_{name.upper()}", x)) for name, x in SETTINGS.items()}
    starts = settings["restarts"] + 1
    bounds = [round(settings["steps"] * i / starts) for i in range(starts + 1)]
    expected = {"count": 0, "skipped": 0, "dropped": 0}
    for first, last in zip(bounds, bounds[1:], strict=False):
        found = segment(tmp_path, first, last, expected, settings)
        check(found)
        expected = found[0][-1]["expected"]
        worst = max(report["worst"] for reports in found for report in reports)
        print(f"to step {last}: {expected}, at most {worst:.2f} roundings lost")
    # There were entries that are not finite.
    assert expected["skipped"] > 0


# One process, `python -m tests.system.test_soak JSON`. The step itself measures whether entries
# were lost. Each line on standard output reports the time since the last one.

SIZE, DENSITY = 8000, 0.02
# The steps for which one kind of gradient stays, and the share of steps with entries that are not
# finite. The last steps of each block leave these entries out, instead of the step.
_TURN, _NONFINITE = 7, 0.04
_BLOCK, _DROPPING = 50, 10
_EPS = float(np.finfo(np.float32).eps)


def gradient(step: int, worker: int, workers: int) -> np.ndarray:
    """``f32[n]``: the gradient of a worker, with NaN or infinity where :func:`faulty` says."""
    kinds, turn = hard_accumulators(workers, SIZE, seed=step), step // _TURN
    # The mass moves on to other workers and indices.
    kind = list(kinds.values())[turn % len(kinds)]
    out = np.roll(kind, (turn, 97 * turn), axis=(0, 1))[worker]
    place, values = faulty(step, worker, workers)
    out[place] = values
    return out


def faulty(step: int, worker: int, workers: int) -> tuple[np.ndarray, np.ndarray]:
    """The indices and values of a worker's non-finite entries at a step; usually none."""
    rng = np.random.default_rng([step, 1 << 20])
    if rng.random() >= _NONFINITE or rng.integers(workers) != worker:
        return np.zeros(0, np.int64), np.zeros(0, np.float32)
    place = np.unique(rng.integers(SIZE, size=rng.integers(1, 6)))
    return place, rng.choice(np.array([np.nan, np.inf, -np.inf], np.float32), size=place.size)


def parts(policy: str) -> tuple[optax.GradientTransformation, optax.GradientTransformation]:
    """The exchange and the descent; the policies take turns, since they share the state."""
    return optax_ext.ok_topk(density=DENSITY, axis=_task.AXIS, nonfinite=policy), optax.sgd(1e-3)


def make_step(policy: str, mesh: jax.sharding.Mesh) -> Any:
    """``step(params, opt_state, gradients [P, n]) -> (params, opt_state, error)``.

    ``error f32[]`` is the largest difference, over all entries, between accumulated and delivered
    or kept values, in units of the rounding of one float32 addition of that entry.
    """
    sparse, descent = parts(policy)

    def local_step(params, opt_state, gradients):
        before, gradient = opt_state[0].residual[0], gradients[0]
        total, sparse_state = sparse.update(gradient, opt_state[0], params)
        finite = jnp.isfinite(before + gradient)
        if policy == "skip":
            finite = lax.pmin(jnp.all(finite).astype(jnp.int32), _task.AXIS) == 1
        added, kept = jnp.where(finite, gradient, 0.0), sparse_state.residual[0]
        sums = jnp.stack([before + added - kept, jnp.abs(before) + jnp.abs(added)])
        sums = lax.psum(sums, _task.AXIS)
        difference = jnp.abs(sums[0] - total * lax.axis_size(_task.AXIS))
        unit = jnp.maximum(sums[1] * _EPS, np.finfo(np.float32).tiny)
        updates, descent_state = descent.update(total, opt_state[1], params)
        params = optax.apply_updates(params, updates)
        return params, (sparse_state, descent_state), jnp.max(difference / unit)

    def step(params, opt_state, gradients):
        specs = optax_ext.state_specs(opt_state)
        ins, outs = (P(), specs, P(_task.AXIS)), (P(), specs, P())
        mapped = jax.shard_map(local_step, mesh=mesh, in_specs=ins, out_specs=outs)
        return mapped(params, opt_state, gradients)

    return jax.jit(step, donate_argnums=(0, 1))


def memory() -> dict[str, float]:
    """Resident MiB of this process, and pieces of memory that it maps."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    maps = Path("/proc/self/maps").read_bytes().count(b"\n")
    return {"rss": pages * 4096 / 2**20, "maps": maps}


def main() -> None:
    """Takes the steps from ``first`` to ``last``."""
    settings = SimpleNamespace(**groups.settings())
    groups.join(vars(settings))
    manager, mesh = _task.manager_of(Path(settings.folder)), _task.mesh_of_all()
    with deadline("the start", 600):
        params, tx = np.zeros(SIZE, np.float32), optax.chain(*parts("skip"))
        if settings.first:
            params, opt_state = _task.restore(manager, settings.first, mesh, tx, params)
        else:
            params = _task.placed(params, NamedSharding(mesh, P()))
            opt_state = optax_ext.init_state(tx, params, mesh)
        steps = {policy: make_step(policy, mesh) for policy in ("skip", "drop")}
    _soak(settings, manager, steps, params, opt_state)
    with deadline("the end", settings.deadline):
        manager.close()
        jax.distributed.shutdown()
    say("finished")


def _soak(settings, manager, steps, params, opt_state) -> None:
    workers, expected = settings.processes, settings.expected
    split = NamedSharding(_task.mesh_of_all(), P(_task.AXIS))
    used: set[str] = set()
    worst = 0.0
    for step in range(settings.first, settings.last):
        own = gradient(step, settings.index, workers)[None]
        policy = "drop" if step % _BLOCK >= _BLOCK - _DROPPING else "skip"
        gradients = jax.make_array_from_process_local_data(split, own)
        # The first step of each policy compiles.
        with deadline(f"step {step}", settings.deadline if policy in used else 600):
            taken = steps[policy](params, opt_state, gradients)
            params, opt_state, error = jax.block_until_ready(taken)
        used.add(policy)
        # Not max(), which would pass over a NaN.
        worst = float(error) if not float(error) <= worst else worst
        bad = sum(faulty(step, i, workers)[0].size for i in range(workers))
        expected["dropped"] += bad if policy == "drop" else 0
        expected["skipped"] += int(bad > 0 and policy == "skip")
        expected["count"] += int(bad == 0 or policy == "drop")
        done = step + 1
        if done % settings.save_every == 0 or done == settings.last:
            with deadline(f"checkpoint {done}", 600):
                _task.save(manager, done, params, opt_state)
        if done % settings.report_every == 0 or done == settings.last:
            held = np.asarray(params.addressable_shards[0].data)
            assert worst <= 2 * workers + 4, f"entries lost, by {worst} roundings"
            assert np.isfinite(held).all()
            assert {name: int(getattr(opt_state[0], name)) for name in expected} == expected
            # Both steps are compiled, and a checkpoint was written.
            settled = len(used) == len(steps) and done > settings.first + settings.save_every
            found = {"params": zlib.crc32(held.tobytes()), "settled": settled, **memory()}
            say("report", step=done, worst=worst, expected=expected, **found)
            worst = 0.0


if __name__ == "__main__":
    groups.run(main)
