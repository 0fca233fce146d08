"""The report in a browser: at three widths, light and dark, and its final content."""

import shutil
import subprocess

import numpy as np
import pytest

from cyxjax.observe.report.page import page
from tests.unit.observe.test_report import read, write_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium here: apt-get install chromium"),
]
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")


# A window of chromium is at least 500 wide; colours follow no width.
@pytest.mark.parametrize(("width", "dark"), [(500, False), (800, True), (1280, False)])
def test_a_page_is_drawn_and_nothing_leaves_it(tmp_path, width, dark):
    pillow = pytest.importorskip("PIL.Image", reason="pip install pillow")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    (tmp_path / "page.html").write_text(page([read(write_run(tmp_path / "run"))]))
    profile, size = f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900"
    command = [BROWSER, *FLAGS, profile, scheme, size, f"--screenshot={tmp_path}/shot.png"]
    subprocess.run([*command, f"file://{tmp_path}/page.html"], capture_output=True, timeout=120, check=True)
    seen = np.asarray(pillow.open(tmp_path / "shot.png").convert("RGB")).astype(int)
    assert seen.shape[1] == width
    paper = seen[-1, 2]
    assert (paper < 60).all() if dark else (paper > 200).all()
    other = (np.abs(seen - paper).sum(-1) > 60).mean(0)
    assert other.max() > 0.02  # text and lines
    assert other[-8:].max() == 0  # nothing is cut off at the right, or touches the edge
