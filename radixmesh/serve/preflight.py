"""What can be known to fail before anything is started, as one clear line."""

import errno
import socket

from radixmesh.errors import CommandError


def check_port_free(host: str, port: int) -> None:
    """Raises CommandError when `host` is not ours to listen on, or another process listens there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server will: TIME_WAIT is no obstacle
            probe.bind(address)
    except socket.gaierror as error:
        raise CommandError(f"--host {host!r} is no address of this machine: {error.strerror}") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise CommandError(f"port {port} on {host} is taken; choose another with --port") from error
        raise CommandError(f"cannot listen on {host} port {port}: {error.strerror}") from error
