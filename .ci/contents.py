"""What a built package holds: python .ci/contents.py DIST. Exits 1 if it holds more than it should, or too much of it.

The wheel is the package and its metadata alone; the source archive also has tests, documents and examples.
"""

import sys
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

MOST = {"featlearn": {".whl": 1_300_000, ".gz": 9_000_000}, "featlearn_papers": {".whl": 5_000_000, ".gz": 9_000_000}}
NEEDED = {
    "featlearn": ["featlearn/py.typed"],
    "featlearn_papers": ["featlearn_papers/py.typed", "featlearn_papers/results/000/fig1/claims.json"],
}
FORBIDDEN = ("__pycache__", ".pyc", ".git/", ".venv", "runs/", ".hypothesis")


def members(path: Path) -> dict[str, int]:
    """Names below the top of the archive, and bytes."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            return {info.filename: info.file_size for info in archive.infolist()}
    with tarfile.open(path) as archive:
        return {name.partition("/")[2]: archive.getmember(name).size for name in archive.getnames()}


def problems(path: Path, found: dict[str, int]) -> list[str]:
    """What should not be there, and what is missing."""
    wrong = [name for name in found if any(part in name for part in FORBIDDEN)]
    if path.suffix == ".whl":
        package = path.name.split("-")[0]
        wrong += [name for name in found if not name.startswith((f"{package}/", f"{package}-"))]
        wrong += [name for name in found if name.endswith("numbers.csv")]
        wrong += [f"{name} is missing" for name in NEEDED[package] if name not in found]
    most = MOST[path.name.split("-")[0]][path.suffix]
    if path.stat().st_size > most:
        wrong.append(f"{path.stat().st_size} bytes, expected at most {most}")
    return wrong


def main() -> int:
    """Print the folders of each archive, the largest first."""
    archives = sorted(Path(sys.argv[1]).glob("featlearn*"))
    expected = "a wheel and a source archive of each of two distributions"
    failed = [] if len(archives) == 4 else [f"{len(archives)} archives, expected {expected}"]
    for path in archives:
        found = members(path)
        print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB, {len(found)} files")
        folders: Counter[str] = Counter()
        for name, size in found.items():
            folders["/".join(name.split("/")[:-1][:2])] += size
        for folder, size in folders.most_common(8):
            print(f"  {size / 1e6:6.2f} MB  {folder or '.'}")
        failed += [f"{path.name}: {problem}" for problem in problems(path, found)]
    print(*failed, sep="\n", end="")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
