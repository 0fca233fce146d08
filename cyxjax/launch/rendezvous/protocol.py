"""What the ranks say to the meeting place: bounded lines of JSON, and a proof of the job's token.

The token itself never travels: the meeting place sends a nonce, the rank answers with an HMAC of it.
"""

import json
import os
from typing import Any

MAX_LINE = 16_384  # bytes of one message; the largest real one (a rank's versions) is below 1 kB
PROTOCOL = 1

Message = dict[str, Any]


class BadMessage(ValueError):
    """Bytes that are no message of ours."""


def encode(message: Message) -> bytes:
    """One line of JSON."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message in `line`. Raises: BadMessage for anything but one JSON object of bounded length."""
    if len(line) > MAX_LINE:
        raise BadMessage("line too long")
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadMessage("not JSON") from error
    if not isinstance(message, dict):
        raise BadMessage("not an object")
    return message


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


def new_token() -> str:
    """A secret for one job: 32 random bytes, in hex."""
    return os.urandom(32).hex()


def new_nonce() -> str:
    return os.urandom(16).hex()


def sign(token: str, nonce: str, message: Message) -> str:
    """HMAC-SHA256 over the nonce and what the message claims, so that neither can be changed or replayed."""
    import hmac  # loads OpenSSL, 4 ms: a launcher's first ranks start before it needs a signature

    claims = json.dumps({k: v for k, v in message.items() if k != "mac"}, sort_keys=True)
    return hmac.new(token.encode(), f"{nonce}|{claims}".encode(), "sha256").hexdigest()


def verify(token: str, nonce: str, message: Message) -> bool:
    """True when `message` was signed with `token`; compared in constant time."""
    import hmac

    said = message.get("mac")
    return isinstance(said, str) and hmac.compare_digest(said.encode(), sign(token, nonce, message).encode())
