"""A switch that delays: `python delaying.py SECONDS INTERFACE…` passes frames on after a time. The kernel has no netem.

`python delaying.py plain INTERFACE` has the kernel complete each frame of this interface before the relay reads it: a
checksum is left out otherwise. Needs the rights on the current network, and nothing but the standard library.
"""

from __future__ import annotations

import array
import fcntl
import select
import socket
import struct
import sys
import time
from collections import deque

_SIOCETHTOOL, _SET_TX_CHECKSUM, _SET_TSO, _SET_GSO = 0x8946, 0x17, 0x1F, 0x24
_EVERY_PROTOCOL, _OUTGOING = 0x0003, 4
_FRAME_BYTES, _BUFFER_BYTES = 2**16, 2**26
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33


def complete_frames(interface: str) -> None:
    """Switch off what a network card does for the kernel: checksums and segments."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for command in (_SET_TSO, _SET_GSO, _SET_TX_CHECKSUM):
            value = array.array("I", [command, 0])
            request = struct.pack("16sP", interface.encode(), value.buffer_info()[0])
            fcntl.ioctl(control, _SIOCETHTOOL, request)


def _end(interface: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERY_PROTOCOL))
    for option in (_SO_SNDBUFFORCE, _SO_RCVBUFFORCE):
        end.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    end.bind((interface, 0))
    return end


def relay(delay_s: float, interfaces: list[str]) -> None:
    """Pass frames between the interfaces, each after `delay_s`, for ever."""
    ends = [_end(interface) for interface in interfaces]
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()
    places: dict[bytes, socket.socket] = {}
    print("relaying", flush=True)
    while True:
        timeout_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for end in select.select(ends, [], [], timeout_s)[0]:
            frame, origin = end.recvfrom(_FRAME_BYTES)
            if origin[2] != _OUTGOING:
                places[frame[6:12]] = end
                waiting.append((time.monotonic() + delay_s, end, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, origin_end, frame = waiting.popleft()
            known = places.get(frame[:6])
            for target in [known] if known else ends:
                if target is not origin_end:
                    target.send(frame)


if __name__ == "__main__":
    if sys.argv[1] == "plain":
        complete_frames(sys.argv[2])
    else:
        relay(float(sys.argv[1]), sys.argv[2:])
