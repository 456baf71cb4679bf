"""A switch in user space that delivers every frame late.

    python -m benchmarks._common.late_switch SECONDS TAP [TAP ...]

A frame that arrives at a TAP interface leaves, so many seconds later, by the interface of its
destination. This makes a link of high latency on kernels that have no netem. Larger frames need
less computing. The switch ends with its standard input.
"""

import collections
import contextlib
import fcntl
import os
import select
import struct
import sys
import time

_TUN = "/dev/net/tun"
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
# Where a frame holds its destination and its source.
_TO, _FROM = slice(0, 6), slice(6, 12)
_LARGEST = 65_536
# At most so many frames are read from one port before the others have their turn.
_IN_A_ROW = 64


def switch(seconds: float, taps: list[int], end: int) -> None:
    """Delivers frames until the file ``end`` becomes readable."""
    late: collections.deque[tuple[float, int, bytes]] = collections.deque()
    known: dict[bytes, int] = {}
    poll = select.epoll()
    for file in (*taps, end):
        poll.register(file, select.EPOLLIN | select.EPOLLHUP)
    while True:
        wait = max(0.0, late[0][0] - time.monotonic()) if late else None
        for file, _ in poll.poll(wait):
            if file == end:
                return
            with contextlib.suppress(BlockingIOError):
                for _ in range(_IN_A_ROW):
                    frame = os.read(file, _LARGEST)
                    late.append((time.monotonic() + seconds, file, frame))
        now = time.monotonic()
        while late and late[0][0] <= now:
            _, source, frame = late.popleft()
            known[frame[_FROM]] = source
            target = known.get(frame[_TO])
            for file in taps if target is None else (target,):
                if file != source:
                    # A full port loses frames, as the ports of any switch do.
                    with contextlib.suppress(BlockingIOError):
                        os.write(file, frame)


def _opened(name: str) -> int:
    file = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return file


def main(argv: list[str]) -> None:
    """Opens the interfaces, prints that they are ready, and delivers."""
    taps = [_opened(name) for name in argv[1:]]
    print("ready", flush=True)
    switch(float(argv[0]), taps, sys.stdin.fileno())


if __name__ == "__main__":
    main(sys.argv[1:])
