"""A network of one interface that answers every first packet of TCP in one way; prints what a probe makes of that.

Usage: answering_network.py reset|port|prohibited, in a network namespace of its own.
"""

import fcntl
import os
import socket
import struct
import subprocess
import sys
import threading

from remesh.wire.listening import is_listening

_TUNSETIFF, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001
_HERE, _THERE = "10.9.0.1", "10.9.0.2"
_ICMP_CODES = {"port": 3, "prohibited": 13}


def checksum(data: bytes) -> int:
    """The internet checksum of an even number of bytes."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def packet(protocol: int, payload: bytes) -> bytes:
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(payload), 0, 0, 64, protocol, 0)
    head += socket.inet_aton(_THERE) + socket.inet_aton(_HERE)
    return head[:10] + struct.pack("!H", checksum(head)) + head[12:] + payload


def answer_to(syn: bytes, how: str) -> bytes:
    """What comes back for a SYN."""
    source, target, number = struct.unpack("!HHI", syn[20:28])
    if how == "reset":
        tcp = struct.pack("!HHIIBBHHH", target, source, 0, number + 1, 0x50, 0x14, 0, 0, 0)
        pseudo = socket.inet_aton(_THERE) + socket.inet_aton(_HERE) + struct.pack("!BBH", 0, 6, len(tcp))
        return packet(6, tcp[:16] + struct.pack("!H", checksum(pseudo + tcp)) + tcp[18:])
    icmp = struct.pack("!BBHI", 3, _ICMP_CODES[how], 0, 0) + syn[:28]
    return packet(1, icmp[:2] + struct.pack("!H", checksum(icmp)) + icmp[4:])


def main(how: str) -> None:
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH", b"far", _TUN_WITHOUT_HEADER))
    for command in (f"ip addr add {_HERE}/24 dev far", "ip link set far up"):
        subprocess.run(command.split(), check=True)

    def serve() -> None:
        while True:
            found = os.read(tun, 2000)
            if found[0] >> 4 == 4 and found[9] == 6:
                os.write(tun, answer_to(found, how))

    threading.Thread(target=serve, daemon=True).start()
    print(is_listening(_THERE, 29400, 20.0), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
