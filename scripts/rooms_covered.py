"""Which share of each room's lines and branches the tests reach, from the newest .coverage: `make cover`."""

import json
import subprocess
import sys
from collections import Counter

COUNTS = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def main() -> None:
    """Prints a row a room, the least covered first."""
    words = [sys.executable, "-m", "coverage", "json", "--quiet", "-o", "-"]
    found = json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout)["files"]
    rooms: dict[str, Counter[str]] = {}
    for path, file in found.items():
        room = path.split("/")[1].removesuffix(".py")
        rooms.setdefault(room, Counter()).update({name: file["summary"][name] for name in COUNTS})
    print(f"{'room':<12}{'lines':>8}{'reached':>9}{'branches':>10}{'reached':>9}{'both':>7}")
    for share, room in sorted((_share(counts), room) for room, counts in rooms.items()):
        lines, reached, branches, taken = (rooms[room][name] for name in COUNTS)
        print(f"{room:<12}{lines:>8}{reached:>9}{branches:>10}{taken:>9}{share:>7.1%}")


def _share(counts: Counter[str]) -> float:
    whole = counts["num_statements"] + counts["num_branches"]
    return (counts["covered_lines"] + counts["covered_branches"]) / max(whole, 1)


if __name__ == "__main__":
    main()
