"""Messages between the processes of a job: bounded lines of JSON, authenticated with the job's token.

The token is never sent. Both ends of a connection prove that they know it, over a nonce of each
(handshake.py); from then on every line carries a MAC under a key of that connection, which covers the
line's direction and number.
"""

import json
import os
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any

MAX_LINE = 16_384  # bytes of one message; the largest real one (a rank's versions) is below 1 kB
MAX_DEPTH = 8  # objects and lists within one another; ours go three deep
PROTOCOL = 2
SLICE_S = 1.0  # waits are counted in such pieces, so that a process that was suspended has not waited
_MAC = 64  # hex digits

Message = dict[str, Any]


class BadMessage(ValueError):
    """Bytes that are not a message of this protocol."""


def encode(message: Message) -> bytes:
    """One line of JSON."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message in `line`. Raises: BadMessage for anything but one JSON object of bounded length and depth.

    What is returned can be written as JSON and as UTF-8: no half of a surrogate pair, no NaN.
    """
    if len(line) > MAX_LINE:
        raise BadMessage("line too long")
    try:
        message = json.loads(line.decode(), parse_constant=_refuse)
        json.dumps(message, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadMessage("not JSON") from error
    if not isinstance(message, dict) or not _fits(message, MAX_DEPTH):
        raise BadMessage("not a flat object")
    return message


def _refuse(constant: str) -> None:
    raise BadMessage(f"{constant} is not JSON")


def _fits(value: Any, depth: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return inner is None or (depth > 0 and all(_fits(part, depth - 1) for part in inner))


def printable(text: object, limit: int = 2000, keep: str = "") -> str:
    """`text` of another process as one harmless line: control characters are shown as their escapes.

    keep: characters that are left as they are all the same.
    """
    cut = str(text)[:limit]
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in cut)


class Codec:
    """Messages from and to the bytes of one connection; holds at most one incomplete line.

    After `authenticate` every line begins with its MAC; one that is forged, replayed or out of order is bad.
    """

    def __init__(self) -> None:
        self._rest, self._lines = b"", deque[bytes]()
        self._key = b""
        self._next_out = self._next_in = ""  # what the next MAC covers besides the line
        self._sent = self._received = 0

    def authenticate(self, key: bytes, *, is_server: bool) -> None:
        """key: of this connection (session_key). is_server: which end this is."""
        self._key = key
        self._next_out, self._next_in = ("server", "client") if is_server else ("client", "server")

    def feed(self, data: bytes) -> None:
        """Adds received bytes. Raises: BadMessage, after which the sender is not to be read."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE + _MAC:
            raise BadMessage("line too long")
        self._lines += lines

    def next(self) -> Message | None:
        """The next complete message, None without one. Raises: BadMessage."""
        if not self._lines:
            return None
        line = self._lines.popleft()
        if self._key:
            mac, line = line[:_MAC], line[_MAC:]
            if not _equal(mac, self._mac(f"{self._next_in}|{self._received}", line)):
                raise BadMessage("not authenticated")
            self._received += 1
        return decode(line)

    def encode(self, message: Message) -> bytes:
        line = encode(message)
        if not self._key:
            return line
        self._sent += 1
        return self._mac(f"{self._next_out}|{self._sent - 1}", line[:-1]) + line

    def _mac(self, about: str, line: bytes) -> bytes:
        return _hmac(self._key, about.encode() + b"|" + line).hex().encode()


class Channel:
    """The client's end of a connection, with calls that wait. Any thread may send; one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self.codec = connection, Codec()
        self._sending = threading.RLock()  # lines leave in the order of their MACs

    def send(self, message: Message) -> None:
        with self._sending:
            self.socket.sendall(self.codec.encode(message))

    def close(self) -> None:
        """Ends the connection, also for a thread that waits in `next`, which a plain close does not wake."""
        with suppress(OSError):  # the other end was first
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def next(self, timeout_s: float | None = None) -> Message | None:
        """The next message, whole within `timeout_s`; None at the end of the connection.

        Raises: TimeoutError; BadMessage for bytes that are not of this protocol.
        """
        left_s = float("inf") if timeout_s is None else timeout_s
        while (message := self.codec.next()) is None:
            if left_s <= 0:
                raise TimeoutError("no whole message in time")
            began = time.monotonic()
            data: bytes | None = None
            try:
                self.socket.settimeout(None if timeout_s is None else min(left_s, SLICE_S))
                data = self.socket.recv(MAX_LINE)
            except TimeoutError:
                pass
            except OSError:  # reset, or closed by another thread of ours
                return None
            if data == b"":
                return None
            self.codec.feed(data or b"")
            left_s -= min(time.monotonic() - began, 2 * SLICE_S)
        return message


def new_token() -> str:
    """A secret for one job: 32 random bytes, in hex."""
    return os.urandom(32).hex()


def new_nonce() -> str:
    return os.urandom(16).hex()


def proof(token: str, who: str, server_nonce: str, client_nonce: str) -> str:
    """HMAC-SHA256 over both nonces, as `who` ("server" or "client") proves that it knows the token."""
    return _hmac(_bytes(token), f"{who}|{server_nonce}|{client_nonce}".encode()).hex()


def session_key(token: str, server_nonce: str, client_nonce: str) -> bytes:
    return _hmac(_bytes(token), f"session|{server_nonce}|{client_nonce}".encode())


def is_proof(given: object, expected: str) -> bool:
    """Compares in constant time."""
    return isinstance(given, str) and given.isascii() and _equal(given.encode(), expected.encode())


def _equal(given: bytes, expected: bytes) -> bool:
    import hmac

    return hmac.compare_digest(given, expected)


def _hmac(key: bytes, text: bytes) -> bytes:
    import hmac  # loads OpenSSL, 4 ms: a launcher's first ranks start before it needs a MAC

    return hmac.digest(key, text, "sha256")


def _bytes(token: str) -> bytes:
    return token.encode(errors="surrogateescape")  # a variable's bytes need not be UTF-8
