"""What is said at the meeting place: bounded lines of JSON, and a proof of the job's token.

The token itself never travels: the meeting place sends a nonce, whoever comes answers with an HMAC of it.
The other side of the greeting is in handshake.py.
"""

import json
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

MAX_LINE = 16_384  # bytes of one message; the largest real one (a rank's versions) is below 1 kB
MAX_DEPTH = 8  # objects and lists within one another; ours go three deep
PROTOCOL = 1
SLICE_S = 1.0  # waits are counted in such pieces, so that a process that was suspended has not waited

Message = dict[str, Any]


class BadMessage(ValueError):
    """Bytes that are no message of ours."""


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
    """`text` of another process as one harmless line: what steers a terminal is shown as its escape.

    keep: characters that are left as they are all the same.
    """
    said = str(text)[:limit]
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in said)


class Lines:
    """Collects bytes into lines. Holds at most MAX_LINE bytes."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Message]:
        """The messages completed by `data`. Raises: BadMessage, after which the sender is not to be heard."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE:
            raise BadMessage("line too long")
        return [decode(line) for line in lines]


class Channel:
    """Our end of a connection to a meeting place. `inbox` holds what has come and was not asked for yet."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self.lines, self.inbox = connection, Lines(), list[Message]()

    def send(self, message: Message) -> None:
        self.socket.sendall(encode(message))

    def next(self, timeout_s: float) -> Message | None:
        """The next message, whole within `timeout_s`; None at the end of the connection.

        Raises: TimeoutError; BadMessage for bytes that are none of ours.
        """
        left_s = timeout_s
        while not self.inbox:
            if left_s <= 0:
                raise TimeoutError("no whole message in time")
            began = time.monotonic()
            self.socket.settimeout(min(left_s, SLICE_S))
            try:
                data = self.socket.recv(MAX_LINE)
                self.inbox += self.lines.feed(data)
            except TimeoutError:
                data = b"-"
            except ConnectionError:
                return None
            if not data:
                return None
            left_s -= min(time.monotonic() - began, 2 * SLICE_S)
        return self.inbox.pop(0)

    def introduce(self, hello: Message, token: str, timeout_s: float) -> bool:
        """Says who we are, with proof of `token`, to a meeting place that greets; False if it hangs up first.

        Raises: BadMessage when what answers is no meeting place; TimeoutError when it says nothing.
        """
        greeting = self.next(timeout_s)
        if greeting is None:
            return False
        nonce = greeting.get("nonce")
        if greeting.get("cyxjax") != PROTOCOL or not isinstance(nonce, str):
            raise BadMessage("no greeting of ours")
        self.send({**hello, "mac": sign(token, nonce, hello)})
        return True


def new_token() -> str:
    """A secret for one job: 32 random bytes, in hex."""
    return os.urandom(32).hex()


def new_nonce() -> str:
    return os.urandom(16).hex()


def sign(token: str, nonce: str, message: Mapping[str, Any]) -> str:
    """HMAC-SHA256 over the nonce and what the message claims, so that neither can be changed or replayed."""
    import hmac  # loads OpenSSL, 4 ms: a launcher's first ranks start before it needs a signature

    claims = json.dumps({k: v for k, v in message.items() if k != "mac"}, sort_keys=True)
    key = token.encode(errors="surrogateescape")  # a variable's bytes need not be UTF-8
    return hmac.new(key, f"{nonce}|{claims}".encode(), "sha256").hexdigest()


def verify(token: str, nonce: str, message: Message) -> bool:
    """True when `message` was signed with `token`; compared in constant time."""
    import hmac

    said, expected = message.get("mac"), sign(token, nonce, message)
    return isinstance(said, str) and said.isascii() and hmac.compare_digest(said, expected)
