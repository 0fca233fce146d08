"""The pictures of the README and the documentation, from a real run of configs/digits.yaml.

python .github/docs/images/make.py    needs Chromium, and pillow (extra `plot`)
"""

import contextlib
import io
import os
import pty
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
COLUMNS = 140  # an epoch's line fits
EPOCHS = 8


def main() -> None:
    """Trains, and writes console.png and report.png beside this file."""
    config = HERE.parents[2] / "configs" / "digits.yaml"
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        shown = in_a_terminal(
            [sys.executable, "-m", "cyxjax.train", "--config", str(config), "--epochs", str(EPOCHS)]
        )
        page = Path("console.html").resolve()
        page.write_text(as_html(shown))
        picture(page, HERE / "console.png", 1000, 26 + 17 * (1 + len(lines_of(shown))))
        picture(Path("runs/digits/report.html").resolve(), HERE / "report.png", 1100, 880)


def in_a_terminal(words: list[str]) -> str:
    """What `words` write to a terminal of COLUMNS columns. Raises: SystemExit if they fail."""
    parts: list[bytes] = []

    def read(descriptor: int) -> bytes:
        parts.append(os.read(descriptor, 65536))
        return parts[-1]

    os.environ |= {"COLUMNS": str(COLUMNS), "LINES": "40", "TERM": "xterm-256color"}
    code = pty.spawn(["sh", "-c", f'stty cols {COLUMNS}; exec "$@"', "sh", *words], read)
    if code:
        raise SystemExit(b"".join(parts).decode() + f"\nthe run ended with {code}")
    return b"".join(parts).decode()


def lines_of(shown: str) -> list[str]:
    """The lines that stay on the screen: of a line that is drawn over, what was drawn last."""
    lines = [line.rstrip("\r").split("\r")[-1].replace("\x1b[K", "") for line in shown.split("\n")]
    return [line for line in lines if Text.from_ansi(line).plain.strip()]


def as_html(shown: str) -> str:
    """The lines as a dark page, in the terminal's colours."""
    console = Console(record=True, width=COLUMNS + 10, file=io.StringIO(), color_system="truecolor")
    for line in lines_of(shown):
        console.print(Text.from_ansi(line), soft_wrap=True)
    body = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
    style = (
        "body{background:#1b1f27;color:#d8dee9;margin:12px}pre{font:12px/17px 'DejaVu Sans Mono',monospace}"
    )
    return f"<!doctype html><meta charset=utf-8><style>{style}</style>{body}"


def picture(page: Path, path: Path, width: int, height: int) -> None:
    """A screenshot of `page`, with 128 colours: some tens of kilobytes."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("no Chromium here. HINT: apt-get install chromium")
    words = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--force-device-scale-factor=1.5",
    ]
    words += [f"--window-size={width},{height}", f"--screenshot={path}", page.as_uri()]
    subprocess.run([browser, *words], check=True, capture_output=True, timeout=120)
    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)


if __name__ == "__main__":
    main()
