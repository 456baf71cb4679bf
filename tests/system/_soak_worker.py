"""One process of the soak; `test_soak` starts it. Its argument is a JSON object.

A step's gradients come from `_patterns`, and the step itself measures whether anything was lost.
Each line on standard output says what was found since the last one.
"""

import os
import traceback
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import optax_ext
from tests import groups
from tests.groups import say
from tests.system import _patterns, _task

DENSITY = 0.02
# Of each block of steps, the last ones leave out entries that are not finite, instead of the step.
_BLOCK, _DROPPING = 50, 10
_EPS = float(np.finfo(np.float32).eps)


def policy_of(step: int) -> str:
    """What becomes of gradients that are not finite."""
    return "drop" if step % _BLOCK >= _BLOCK - _DROPPING else "skip"


def parts(policy: str) -> tuple[optax.GradientTransformation, optax.GradientTransformation]:
    """The exchange and the descent; their state is the same for each policy, so they take turns."""
    return optax_ext.ok_topk(density=DENSITY, axis=_task.AXIS, nonfinite=policy), optax.sgd(1e-3)


def make_step(policy: str, mesh: jax.sharding.Mesh) -> Any:
    """``step(params, opt_state, gradients [P, n]) -> (params, opt_state, error)``.

    ``error f32[]`` is the largest difference between what was accumulated and what was delivered
    or kept, over all entries, in units of the rounding of one float32 addition of that entry.
    """
    sparse, descent = parts(policy)

    def local_step(params, opt_state, gradients):
        before = opt_state[0].residual[0]
        gradient = gradients[0]
        total, sparse_state = sparse.update(gradient, opt_state[0], params)
        finite = jnp.isfinite(before + gradient)
        if policy == "skip":
            finite = lax.pmin(jnp.all(finite).astype(jnp.int32), _task.AXIS) == 1
        added = jnp.where(finite, gradient, 0.0)
        kept = sparse_state.residual[0]
        sums = lax.psum(
            jnp.stack([before + added - kept, jnp.abs(before) + jnp.abs(added)]), _task.AXIS
        )
        difference = jnp.abs(sums[0] - total * lax.axis_size(_task.AXIS))
        unit = jnp.maximum(sums[1] * _EPS, np.finfo(np.float32).tiny)
        updates, descent_state = descent.update(total, opt_state[1], params)
        params = optax.apply_updates(params, updates)
        return params, (sparse_state, descent_state), jnp.max(difference / unit)

    def step(params, opt_state, gradients):
        specs = optax_ext.state_specs(opt_state)
        whole, split = PartitionSpec(), PartitionSpec(_task.AXIS)
        return jax.shard_map(
            local_step,
            mesh=mesh,
            in_specs=(whole, specs, split),
            out_specs=(whole, specs, whole),
        )(params, opt_state, gradients)

    return jax.jit(step, donate_argnums=(0, 1))


def memory() -> dict[str, float]:
    """Resident MiB of this process, and pieces of memory that it maps."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    maps = Path("/proc/self/maps").read_bytes().count(b"\n")
    return {"rss": pages * 4096 / 2**20, "maps": maps}


def main() -> None:
    """Takes the steps from ``first`` to ``last``."""
    settings = groups.settings()
    groups.join(settings)
    watchdog = optax_ext.contrib.Watchdog(settings["deadline"], first_seconds=600)
    manager = _task.manager_of(Path(settings["folder"]))
    mesh = _task.mesh_of_all()
    with watchdog("the start"):
        params, opt_state = _start(manager, settings["first"], mesh)
        steps = {policy: make_step(policy, mesh) for policy in ("skip", "drop")}
    _soak(settings, watchdog, manager, steps, params, opt_state)
    with watchdog("the end"):
        manager.close()
        jax.distributed.shutdown()
    say("finished")


def _start(manager: Any, first: int, mesh: jax.sharding.Mesh) -> tuple[Any, Any]:
    whole = NamedSharding(mesh, PartitionSpec())
    params = _task.placed(np.zeros(_patterns.SIZE, np.float32), whole)
    tx = optax.chain(*parts("skip"))
    if first == 0:
        return params, optax_ext.init_state(tx, params, mesh)
    expected = (
        jax.ShapeDtypeStruct(params.shape, params.dtype, sharding=whole),
        optax_ext.abstract_state(tx, params, mesh),
    )
    return _task.restore_into(manager, first, expected)


def _soak(
    settings: dict[str, Any],
    watchdog: optax_ext.contrib.Watchdog,
    manager: Any,
    steps: dict[str, Any],
    params: Any,
    opt_state: Any,
) -> None:
    workers, me, mesh = settings["processes"], settings["index"], _task.mesh_of_all()
    split = NamedSharding(mesh, PartitionSpec(_task.AXIS))
    expected = settings["expected"]
    first = settings["first"]
    used: set[str] = set()
    worst = 0.0
    for step in range(first, settings["last"]):
        own = _patterns.gradient(step, me, workers)[None]
        gradients = jax.make_array_from_process_local_data(split, own)
        policy = policy_of(step)
        # The first step of each policy compiles.
        with watchdog(f"step {step}", seconds=None if policy in used else 600):
            params, opt_state, error = jax.block_until_ready(
                steps[policy](params, opt_state, gradients)
            )
        used.add(policy)
        # Not max(), which would pass over a NaN.
        worst = float(error) if not float(error) <= worst else worst
        bad = sum(_patterns.faulty(step, i, workers)[0].size for i in range(workers))
        expected["dropped"] += bad if policy == "drop" else 0
        expected["skipped"] += int(bad > 0 and policy == "skip")
        expected["count"] += int(bad == 0 or policy == "drop")
        done = step + 1
        if done % settings["save_every"] == 0 or done == settings["last"]:
            with watchdog(f"checkpoint {done}", seconds=600):
                _task.save(manager, done, params, opt_state)
        if done % settings["report_every"] == 0 or done == settings["last"]:
            sparse = opt_state[0]
            found = {name: int(getattr(sparse, name)) for name in expected}
            bits = np.asarray(params.addressable_shards[0].data).tobytes()
            say(
                "report",
                step=done,
                params=zlib.crc32(bits),
                finite=bool(np.isfinite(np.frombuffer(bits, np.float32)).all()),
                worst=worst,
                found=found,
                expected=expected,
                # Both steps are compiled, and a checkpoint was written.
                settled=len(used) == len(steps) and done > first + settings["save_every"],
                **memory(),
            )
            worst = 0.0


if __name__ == "__main__":
    try:
        main()
    except Exception:
        # At once, since the others wait for this one until it is gone.
        traceback.print_exc()
        os._exit(1)
