"""The report as a browser shows it: at three widths, light and dark, and what stands in it afterwards."""

import shutil
import struct
import subprocess
import zlib

import numpy as np
import pytest

from cyxjax.observe.report.page import page
from tests.unit.observe.test_report import read, write_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium here: apt-get install chromium")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")


def browse(tmp_path, *flags):
    command = [
        BROWSER,
        *FLAGS,
        f"--user-data-dir={tmp_path / 'profile'}",
        *flags,
        f"file://{tmp_path}/page.html",
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


@pytest.fixture
def shown(tmp_path):
    (tmp_path / "page.html").write_text(page([read(write_run(tmp_path / "run"))]))
    return tmp_path


def pixels(path):
    """A PNG of 8 bits a channel as uint8 (height, width, channels)."""
    raw, at, data = path.read_bytes(), 8, b""
    while at < len(raw):
        (length,), kind = struct.unpack(">I", raw[at : at + 4]), raw[at + 4 : at + 8]
        body = raw[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, _, colour = struct.unpack(">IIBB", body[:10])
        data += body if kind == b"IDAT" else b""
        at += 12 + length
    depth = {2: 3, 6: 4}[colour]
    rows = np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, 1 + width * depth)
    return _unfiltered(rows, depth).reshape(height, width, depth)


def _unfiltered(rows, depth):
    """Source: PNG specification, section 9 (filter types 0 to 4)."""
    out = np.zeros((len(rows), rows.shape[1] - 1), np.uint8)
    above = np.zeros(rows.shape[1] - 1, np.int64)
    for y, (kind, line) in enumerate(zip(rows[:, 0], rows[:, 1:].astype(np.int64), strict=True)):
        if kind == 2:
            line = (line + above) % 256
        elif kind:
            for x in range(len(line)):
                a, c = (line[x - depth], above[x - depth]) if x >= depth else (0, 0)
                b = above[x]
                paeth = min((abs(b - c), 0, a), (abs(a - c), 1, b), (abs(a + b - 2 * c), 2, c))[2]
                line[x] = (line[x] + {1: a, 3: (a + b) // 2, 4: paeth}[int(kind)]) % 256
        out[y] = above = line
    return out


@pytest.mark.slow
# A window of chromium is at least 500 wide; colours follow no width.
@pytest.mark.parametrize(("width", "dark"), [(500, False), (800, True), (1280, False)])
def test_a_page_is_drawn_and_nothing_leaves_it(shown, width, dark):
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    browse(shown, scheme, f"--window-size={width},900", f"--screenshot={shown}/shot.png")
    seen = pixels(shown / "shot.png")[..., :3].astype(int)
    assert seen.shape[1] == width
    paper = seen[-1, 2]
    assert (paper < 60).all() if dark else (paper > 200).all()
    other = (np.abs(seen - paper).sum(-1) > 60).mean(0)
    assert other.max() > 0.02  # text and lines
    assert other[-8:].max() == 0  # nothing is cut off at the right, or touches the edge


@pytest.mark.slow
def test_what_a_browser_makes_of_the_page_holds_every_part(shown):
    made = browse(shown, "--dump-dom").stdout
    for part in ("curves", "time", "configuration"):
        assert f'<section id="{part}">' in made
    assert made.count("<polyline") >= 4
    assert "Finished: 2 epochs" in made
