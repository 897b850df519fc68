"""Brokers of tests that lend."""

import os
import signal
import socket
import struct


def end_broker(path: str) -> None:
    """Kills the broker at a path, which some process has started."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(path)
        credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    os.kill(struct.unpack("3i", credentials)[0], signal.SIGKILL)
