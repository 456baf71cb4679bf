"""A state of the training, and where the workers of a new group take it from."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from optax_ext.elastic import _handover, _seats
from optax_ext.elastic._job import Job
from optax_ext.elastic._meeting import Plan
from optax_ext.elastic._programs import Group, Programs
from optax_ext.elastic._saving import Saves


class Held(NamedTuple):
    """A state of the training, of the group that it is on.

    Attributes:
      version: counts exchanges and handovers; two workers with the same one have the same state.
      step: steps that have been taken.
      params: global arrays.
      opt_state: global arrays.
    """

    version: int
    step: int
    params: Any
    opt_state: Any


def restored(
    plan: Plan, held: Held | None, group: Group, *, job: Job, programs: Programs, saves: Saves,
    initial: Any,
) -> Held:  # fmt: skip
    """The state of a plan on a new group.

    It is what this worker holds, its part of a checkpoint, or what the other workers give it.

    Args:
      plan: of the meeting.
      held: what this worker holds of the version of the plan.
      group: the workers of the plan.
      job: of this process.
      programs: of the training.
      saves: the checkpoints.
      initial: parameters before the first step.
    """
    me = job.process_id
    size, rank = len(plan.members), plan.members.index(me)
    params, holders = initial, plan.holders
    with jax.default_device(job.devices_of(me)[0]):
        state = programs.fresh(size, group.order.index(me), initial)
        if held is not None:
            params = _seats.own(held.params)
            state = _handover.carried(_seats.own(held.opt_state), state)
        elif plan.saved >= 0:
            saved = saves.load(plan.saved, rank, size, params, programs.state_of)
            holders = plan.members[: saved.size]
            params = saved.params
            if saved.opt_state is not None:
                state = _handover.carried(saved.opt_state, state)
    params = _seats.placed(params, PartitionSpec(), group.mesh)
    state = _seats.placed(state, group.specs, group.mesh)
    if {*holders} != {*plan.members}:
        holds = np.array([process in holders for process in group.order])
        given = _seats.placed(holds, PartitionSpec(), group.mesh)
        params, state = group.welcome(params, state, given)
    jax.block_until_ready((params, state))
    return Held(plan.version, plan.step, params, state)
