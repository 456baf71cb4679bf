"""Network namespaces on a bridge, one for each worker, so that a link can be pulled. Needs root."""

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# 198.18.0.0/15 is reserved for tests of networks, so no real network has it.
_SUBNET = "198.18.0"


class Network(NamedTuple):
    """Names of namespaces.

    Attributes:
      hub: the namespace of the bridge.
      workers: that of each worker.
    """

    hub: str
    workers: list[str]

    def address(self, worker: int) -> str:
        """The IP address of a worker."""
        return f"{_SUBNET}.{worker + 1}"

    def inside(self, worker: int, command: list[str]) -> list[str]:
        """The command, run in the worker's namespace under the same process id."""
        return ["ip", "netns", "exec", self.workers[worker], *command]

    def link_down(self, worker: int) -> None:
        """Takes away the link of a worker, at the bridge: nothing is closed, all is lost."""
        _ip("-n", self.hub, "link", "set", f"port{worker}", "down")


@contextlib.contextmanager
def network(workers: int) -> Iterator[Network]:
    """The namespaces, for the length of the block; the host's own network is not touched.

    Raises:
      RuntimeError: `ip` refuses.
    """
    hub = f"faults{os.getpid()}"
    made = Network(hub, [f"{hub}w{i}" for i in range(workers)])
    # `ip netns exec` shows this file as /etc/hosts: gloo looks up the host's own name.
    hosts = [Path("/etc/netns") / name for name in made.workers]
    try:
        _ip("netns", "add", hub)
        _ip("-n", hub, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", hub, "link", "set", "bridge0", "up")
        for i, name in enumerate(made.workers):
            _ip("netns", "add", name)
            _ip("-n", hub, "link", "add", f"port{i}", "type", "veth", "peer", "eth0", "netns", name)
            _ip("-n", hub, "link", "set", f"port{i}", "master", "bridge0", "up")
            _ip("-n", name, "address", "add", f"{made.address(i)}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _ip("-n", name, "link", "set", device, "up")
            hosts[i].mkdir(parents=True)
            lines = f"127.0.0.1 localhost\n{made.address(i)} {socket.gethostname()}\n"
            (hosts[i] / "hosts").write_text(lines)
        yield made
    finally:
        for name in (*made.workers, hub):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
        for folder in hosts:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[None]:
    """A file system of its own at ``folder``, for the length of the block. Needs root."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    _run("mount", *options)
    try:
        yield
    finally:
        _run("umount", "--lazy", str(folder))


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
