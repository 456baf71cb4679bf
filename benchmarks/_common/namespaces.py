"""Hosts on one switch, made of network namespaces, with a bandwidth limit for each.

Every host is a namespace with one interface, `eth0`, and inside it the name of the machine
resolves to the host's address. The other end of its cable is in one more namespace, on a bridge:
the switch. Nothing is made in the machine's own namespace, so its routes and firewall take no
part, and deleting the namespaces removes everything. A token bucket (`tc tbf`) at both ends of
each cable limits what a host sends and what it receives. With a delay, the switch is a process,
`late_switch`, which holds every frame for that time. Linux only, with root.
"""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .processes import ROOT

_PREFIX = "scnet"
_OURS = re.compile(rf"{_PREFIX}(\d+)-\w+")
# `ip netns exec NAME` mounts the files of its folder in here over /etc.
_ETC = Path("/etc/netns")
# The time that a full queue may take to drain; a real switch has about as much memory.
_QUEUE = "50ms"
_SMALLEST_BURST = 64 * 1024
# Bytes of a frame with and without a delay: with one, a process holds the frames, and fewer
# are better.
_LARGE_FRAMES, _FRAMES = 9000, 1500


class NetworkError(Exception):
    """The network, or a program on its hosts, failed; the message is one line."""


def unusable() -> str | None:
    """Why no network can be made here, in one line; None if one can."""
    if not all(map(shutil.which, ("ip", "tc"))):
        return "ip and tc not found: install iproute2 (Linux only)"
    if os.geteuid() != 0:
        return "network namespaces need root: run this with sudo, or in a privileged container"
    try:
        with network(1, name=f"{_PREFIX}{os.getpid()}") as hosts:
            hosts.limit("1gbit")
            _run(*hosts.command(0), "true")
    except NetworkError as error:
        return str(error)
    return None


class Hosts:
    """The hosts of one network: the prefix of their namespaces, and an address for each."""

    def __init__(self, name: str, count: int):
        self.name = name
        self.addresses = [f"10.213.{i // 250}.{i % 250 + 1}" for i in range(count)]
        self._late: tuple[float, subprocess.Popen[str]] | None = None

    def command(self, host: int) -> list[str]:
        """The prefix that makes a command run on a host."""
        return ["ip", "netns", "exec", f"{self.name}-{host}"]

    def link_down(self, host: int) -> None:
        """Pulls the cable of a host at the switch: connections stay open, all frames are lost."""
        _run("ip", "-n", f"{self.name}-switch", "link", "set", f"port{host}", "down")

    def link_up(self, host: int) -> None:
        """Puts the cable back."""
        _run("ip", "-n", f"{self.name}-switch", "link", "set", f"port{host}", "up")

    def limit(self, link: str) -> None:
        """Limits every cable in both directions to 100mbit, for example; ``none`` is no limit.

        With a delay, as in 100mbit+50ms, a frame takes that long from one host to another.
        """
        self._delay(delay(link))
        link = link.partition("+")[0]
        hosts = range(len(self.addresses))
        ends = [(f"{self.name}-{host}", "eth0") for host in hosts]
        ends += [(f"{self.name}-switch", f"port{host}") for host in hosts]
        for namespace, interface in ends:
            device = ["tc", "-n", namespace, "qdisc"]
            where = ["dev", interface, "root"]
            if link == "none":
                subprocess.run([*device, "del", *where], capture_output=True, check=False)
            else:
                burst = str(max(_SMALLEST_BURST, int(rate(link) / 1000)))
                bucket = ["tbf", "rate", link, "burst", burst, "latency", _QUEUE]
                _run(*device, "replace", *where, *bucket)

    def close(self) -> None:
        """Ends the process that holds frames, if there is one."""
        if self._late is not None:
            self._late[1].communicate("")
            self._late = None

    def _delay(self, seconds: float) -> None:
        """Makes the switch hold every frame for this time."""
        if seconds == (self._late[0] if self._late else 0.0):
            return
        self.close()
        switch, hosts = f"{self.name}-switch", range(len(self.addresses))
        device = ["ip", "-n", switch, "link"]
        for host in hosts:
            # Between the cable and the process, so that the kernel cuts large packets into frames.
            own, tap, port = f"late{host}", f"tap{host}", f"port{host}"
            _run(*device, "set", port, "master", "switch")
            for name in (own, tap):
                subprocess.run([*device, "del", name], capture_output=True, check=False)
            mtu = str(_LARGE_FRAMES if seconds else _FRAMES)
            _run("ip", "-n", f"{self.name}-{host}", "link", "set", "eth0", "mtu", mtu)
            _run(*device, "set", port, "mtu", mtu)
            if seconds:
                _run(*device, "add", own, "mtu", mtu, "type", "bridge")
                _run("ip", "-n", switch, "tuntap", "add", "dev", tap, "mode", "tap")
                _run(*device, "set", tap, "mtu", mtu, "master", own)
                _run(*device, "set", port, "master", own)
                for name in (tap, own):
                    _run(*device, "set", name, "up")
        if seconds:
            command = [sys.executable, "-m", "benchmarks._common.late_switch", str(seconds)]
            process = subprocess.Popen(
                ["ip", "netns", "exec", switch, *command, *(f"tap{host}" for host in hosts)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
            self._late = seconds, process
            if process.stdout is None or process.stdout.readline() != "ready\n":
                raise NetworkError(f"the switch with a delay of {seconds:g} s did not start")


@contextlib.contextmanager
def network(count: int, name: str | None = None) -> Iterator[Hosts]:
    """Hosts that exist inside the `with` block; everything is removed afterwards in any case."""
    name = f"{_PREFIX}{os.getpid()}" if name is None else name
    hosts = Hosts(name, count)
    try:
        _create(hosts)
        yield hosts
    finally:
        hosts.close()
        for namespace in _namespaces(f"{name}-"):
            _delete(namespace)


def clean() -> list[str]:
    """Removes the namespaces of processes that no longer exist; returns their names."""
    dead = []
    for namespace in _namespaces(_PREFIX):
        match = _OURS.fullmatch(namespace)
        if match and not Path("/proc", match[1]).exists():
            dead.append(namespace)
            _delete(namespace)
    return dead


def rate(link: str) -> float:
    """Bytes per second of a link such as 1gbit, infinite for ``none``; a ValueError for others."""
    of_rate = link.partition("+")[0]
    delay(link)
    if of_rate == "none":
        return float("inf")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", of_rate)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{link!r} is not a link: {_LINKS}")
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]] / 8


def delay(link: str) -> float:
    """Seconds a frame takes from one host to another; a ValueError if ``link`` is not a link."""
    _, plus, of_delay = link.partition("+")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)ms", of_delay)
    if plus and (match is None or float(match[1]) == 0):
        raise ValueError(f"{link!r} is not a link: {_LINKS}")
    return float(match[1]) / 1000 if match else 0.0


_LINKS = "write 100mbit, 1gbit, 10gbit or none, and with a delay 100mbit+50ms"


def _create(hosts: Hosts) -> None:
    switch = f"{hosts.name}-switch"
    _run("ip", "netns", "add", switch)
    on_switch = ["ip", "-n", switch, "link"]
    _run(*on_switch, "add", "switch", "type", "bridge")
    _run(*on_switch, "set", "switch", "up")
    for i, address in enumerate(hosts.addresses):
        host, port = f"{hosts.name}-{i}", f"port{i}"
        etc = _ETC / host
        etc.mkdir(parents=True)
        # Gloo takes the address to which the name of the machine resolves.
        (etc / "hosts").write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
        _run("ip", "netns", "add", host)
        _run(*on_switch, "add", port, "type", "veth", "peer", "name", "eth0", "netns", host)
        _run(*on_switch, "set", port, "master", "switch", "up")
        # Without IPv6 addresses the kernel sends no traffic of its own.
        _run("ip", "-n", host, "link", "set", "eth0", "addrgenmode", "none")
        _run("ip", "-n", host, "address", "add", f"{address}/16", "dev", "eth0")
        for interface in ("eth0", "lo"):
            _run("ip", "-n", host, "link", "set", interface, "up")


def _namespaces(prefix: str) -> list[str]:
    """Namespaces with this prefix, and those with only a folder left."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    found = {line.split()[0] for line in listed.stdout.splitlines() if line.strip()}
    found |= {path.name for path in _ETC.glob(f"{prefix}*")}
    return sorted(name for name in found if name.startswith(prefix))


def _delete(namespace: str) -> None:
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)
    shutil.rmtree(_ETC / namespace, ignore_errors=True)
    with contextlib.suppress(OSError):
        _ETC.rmdir()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr or done.stdout).strip().splitlines() or ["no reason"]
        raise NetworkError(f"`{' '.join(command)}` failed: {reason[-1]}")
