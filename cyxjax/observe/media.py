"""What a record may hold beside numbers and words: pictures, texts, histograms."""

import struct
import zlib
from dataclasses import dataclass

import numpy as np

_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, eq=False)
class Image:
    """A picture: uint8 (height, width, 3), and a line of text."""

    pixels: np.ndarray
    caption: str = ""


@dataclass(frozen=True)
class Text:
    """A passage of text."""

    text: str


@dataclass(frozen=True, eq=False)
class Histogram:
    """counts (N,) of values between edges (N + 1,)."""

    counts: np.ndarray
    edges: np.ndarray


Media = Image | Text | Histogram


def histogram(values: np.ndarray, bins: int = 32) -> Histogram:
    """Of the values that are finite numbers."""
    known = np.asarray(values, np.float64).reshape(-1)
    counts, edges = np.histogram(known[np.isfinite(known)], bins)
    return Histogram(counts, edges)


def pictures(values: np.ndarray) -> np.ndarray:
    """uint8 (N, H, W, 3) of (N, H, W, 1 or 3): the least of all values black, the largest white.

    Of more than 96 pixels a side every second, third, ... is taken.
    """
    every = -(-max(values.shape[1:3]) // 96)
    floats = np.nan_to_num(np.asarray(values[:, ::every, ::every], np.float32))
    low, high = (float(edge(floats)) for edge in (np.min, np.max))
    scaled = np.rint(255 * (floats - low) / max(high - low, 1e-12)).astype(np.uint8)
    return np.repeat(scaled, 3, -1) if scaled.shape[-1] == 1 else scaled


def png(pixels: np.ndarray) -> bytes:
    """The file of uint8 (H, W, 3). Source: PNG specification, sections 9 (filter 0) and 11.2."""
    height, width, _ = pixels.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], 1)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
    return _SIGNATURE + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def is_png(raw: bytes) -> bool:
    """Whether `raw` begins as such a file does."""
    return raw.startswith(_SIGNATURE + struct.pack(">I", 13) + b"IHDR")
