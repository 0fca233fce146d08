"""Messages between the processes of a job: bounded lines of JSON, authenticated with the job's token.

The token is never sent. Both ends of a connection prove that they know it, with a nonce of each (server.py);
from then on every line carries a MAC under a key of that connection, which covers the line's direction and
number.
"""

import hmac
import json
import socket
import threading
from collections import deque
from contextlib import suppress
from typing import Any

MAX_LINE = 16_384  # bytes of one message; what a message names is bounded (output.NAMED)
PROTOCOL = 2
_MAC = 64  # hex digits

Message = dict[str, Any]


def encode(message: Message) -> bytes:
    """One line of JSON."""
    # A character takes 6 bytes at most, not the 12 of two escapes; half a pair becomes an escape.
    text = json.dumps(message, separators=(",", ":"), ensure_ascii=False)
    return text.encode(errors="backslashreplace") + b"\n"


def decode(line: bytes) -> Message:
    """The JSON object in `line`. Raises: ValueError for anything else."""
    try:
        message = json.loads(line.decode())
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(message, dict):
        raise ValueError("not an object")
    return message


class Channel:
    """One end of a connection; holds at most one incomplete line. Any thread may send; one receives.

    After `authenticate` every line begins with its MAC; one that is forged, replayed or out of order is bad.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._sending = threading.RLock()  # lines leave in the order of their MACs
        self._rest, self._lines = b"", deque[bytes]()
        self._key = b""
        self._next_out = self._next_in = ""  # what the next MAC covers besides the line
        self._sent = self._received = 0

    def authenticate(self, key: bytes, *, is_server: bool) -> None:
        """key: of this connection (session_key). is_server: which end this is."""
        self._key = key
        self._next_out, self._next_in = ("server", "client") if is_server else ("client", "server")

    def send(self, message: Message) -> None:
        with self._sending:
            self.socket.sendall(self.encode(message))

    def encode(self, message: Message) -> bytes:
        """The next line to send."""
        line = encode(message)
        if not self._key:
            return line
        self._sent += 1
        return self._mac(f"{self._next_out}|{self._sent - 1}", line[:-1]) + line

    def feed(self, data: bytes) -> None:
        """Adds received bytes. Raises: ValueError, after which nothing more may be read."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE + _MAC:
            raise ValueError("line too long")
        self._lines += lines

    def pop(self) -> Message | None:
        """The next message that was received completely; None if there is none. Raises: ValueError."""
        if not self._lines:
            return None
        line = self._lines.popleft()
        if self._key:
            mac, line = line[:_MAC], line[_MAC:]
            if not hmac.compare_digest(mac, self._mac(f"{self._next_in}|{self._received}", line)):
                raise ValueError("not authenticated")
            self._received += 1
        return decode(line)

    def next(self) -> Message | None:
        """Waits for the next message; None at the end of the connection, or of the socket's timeout.

        Raises: ValueError for bytes that are no message.
        """
        while (message := self.pop()) is None:
            try:
                data = self.socket.recv(MAX_LINE)
            except OSError:  # silent, reset, of a host that cannot be reached, or closed by a thread of ours
                return None
            if not data:
                return None
            self.feed(data)
        return message

    def close(self) -> None:
        """Ends the connection, also for a thread that waits in `next`, which a plain close does not wake."""
        with suppress(OSError):  # the other end was first
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _mac(self, about: str, line: bytes) -> bytes:
        return hmac.digest(self._key, about.encode() + b"|" + line, "sha256").hex().encode()


def proof(token: str, who: str, server_nonce: str, client_nonce: str) -> str:
    """HMAC-SHA256 over both nonces, as `who` ("server" or "client") proves that it knows the token."""
    return hmac.digest(_bytes(token), f"{who}|{server_nonce}|{client_nonce}".encode(), "sha256").hex()


def session_key(token: str, server_nonce: str, client_nonce: str) -> bytes:
    return hmac.digest(_bytes(token), f"session|{server_nonce}|{client_nonce}".encode(), "sha256")


def is_proof(given: object, expected: str) -> bool:
    """Compares in constant time."""
    return isinstance(given, str) and given.isascii() and hmac.compare_digest(given, expected)


def _bytes(token: str) -> bytes:
    return token.encode(errors="surrogateescape")  # a variable's bytes need not be UTF-8
