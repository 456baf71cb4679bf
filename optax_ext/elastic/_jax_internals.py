"""Internals of jax that membership needs; no other file uses names that are not public.

A test calls each of these on every version of jax that is supported, so that a name that moves is
noticed there and not in a training.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

import contextlib
import io
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
from jax._src import compiler, distributed, xla_bridge
from jax._src.lib import _jax, xla_client
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

# What `jax.devices` returns; `jax.Device` is a variable to a type checker.
Device = Any
# The first process of a job publishes the list of devices, and can't do so a second time.
_TOPOLOGY = "cpu:global_topology/cpu"
# The folder in which the members of a group of devices publish their addresses.
GROUPS = "cpu:gloo/"


def serve(address: str, processes: int, heartbeat_seconds: int) -> Any:
    """The coordination service of a job, which runs until it is shut down or collected."""
    return _jax.get_distributed_runtime_service(
        address,
        processes,
        heartbeat_timeout=heartbeat_seconds,
        shutdown_timeout=heartbeat_seconds,
        recoverable=True,
    )


def connect(
    address: str,
    process_id: int,
    processes: int,
    heartbeat_seconds: int,
    timeout_seconds: int,
    *,
    on_lost: Callable[[Any], None],
) -> Any:
    """Joins this process to a job, without a service of its own; returns the client.

    ``jax.distributed.initialize`` has no argument for that: its process 0 runs the service, and
    takes it along when it dies.
    """
    jax.config.update("jax_enable_recoverability", True)
    client = _jax.get_distributed_runtime_client(
        address,
        process_id,
        init_timeout=timeout_seconds,
        heartbeat_timeout=heartbeat_seconds,
        missed_heartbeat_callback=on_lost,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    client.connect()
    state = distributed.global_state
    state.coordinator_address = address
    state.process_id, state.num_processes = process_id, processes
    state.client = client
    if process_id == 0:
        client.key_value_delete(_TOPOLOGY)
    return client


def backends_are_initialized() -> bool:
    """Whether jax has looked for devices already, so that settings come too late."""
    return xla_bridge.backends_are_initialized()


def compiled(lowered: jax.stages.Lowered, devices: Sequence[Device]) -> tuple[bytes, list[int]]:
    """A program as bytes that can be kept, and the ids of the devices that it is compiled for."""
    with _without_cache():
        program = lowered.compile()
    return serialize_executable.serialize(program)[0], [device.id for device in devices]


def machine(devices: Sequence[Device]) -> str:
    """The kind of machine that a kept program can run on."""
    topology = xla_client.get_topology_for_devices(list(devices[:1]))
    return f"{devices[0].client.platform_version} {topology.fingerprint()}"


def cache_folder() -> str | None:
    """The folder in which jax keeps compiled programs, if it does."""
    return jax.config.values["jax_compilation_cache_dir"]


@contextlib.contextmanager
def _without_cache() -> Generator[None]:
    """Without jax's cache, since XLA for CPUs can't serialize a program that it read from there."""
    enabled = jax.config.values["jax_enable_compilation_cache"]
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        # jax looks up only once whether there is a cache.
        compilation_cache.reset_cache()
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


def load(
    lowered: jax.stages.Lowered, program: tuple[bytes, list[int]], devices: Sequence[Device]
) -> jax.stages.Compiled:
    """The program on as many other devices; nothing is compiled.

    ``jax.experimental.serialize_executable.deserialize_and_load`` needs the devices that the
    program was compiled for, by their ids.
    """
    data, compiled_for = program
    client = devices[0].client
    unpickler = _Unpickler(io.BytesIO(data), client, devices)
    unpickler.devices_by_id = dict(zip(compiled_for, devices, strict=True))
    unloaded, args, no_kwargs = unpickler.load()
    trees = jax.tree.structure(lowered.args_info), lowered.out_tree
    return jax.stages.Compiled(
        unloaded.load(), [], trees[0].unflatten(args), trees[1], no_kwargs=no_kwargs
    )


class _Unpickler(serialize_executable._JaxPjrtUnpickler):
    def persistent_load(self, pid: Any) -> Any:
        if pid[0] != "exec":
            return super().persistent_load(pid)
        devices = self.execution_devices
        # Without options it would be for the devices that are recorded in it.
        options = compiler.get_compile_options(
            num_replicas=1,
            num_partitions=len(devices),
            device_assignment=[[device.id for device in devices]],
        )
        return self.backend.deserialize_executable(pid[1], devices, options)
