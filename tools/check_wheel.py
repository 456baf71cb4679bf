"""Checks that the built wheel holds both packages in full and that they import from it.

Usage: python tools/check_wheel.py DIST_FOLDER
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("sparse_collectives", "optax_ext")
# Runs in a fresh interpreter, with the folder the wheel was unpacked to ahead of everything else.
IMPORT_CHECK = """
import importlib, pathlib, sys
target = pathlib.Path(sys.argv[1]).resolve()
sys.path.insert(0, str(target))
for name in sys.argv[2:]:
    file = pathlib.Path(importlib.import_module(name).__file__).resolve()
    if not file.is_relative_to(target):
        sys.exit(f"{name} was imported from {file}, not from the wheel")
"""


def check(dist: Path) -> None:
    """Raises SystemExit with one line when the wheel in `dist` is not what it should be."""
    wheels = list(dist.glob("*.whl"))
    if len(wheels) != 1:
        sys.exit(f"expected one wheel in {dist}, found {len(wheels)}")
    with zipfile.ZipFile(wheels[0]) as archive:
        in_wheel = {name for name in archive.namelist() if ".dist-info/" not in name}
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*")]
    expected = {
        path.relative_to(ROOT).as_posix()
        for path in paths
        if path.is_file() and "__pycache__" not in path.parts
    }
    # Without py.typed type checkers would ignore the packages.
    expected |= {f"{package}/py.typed" for package in PACKAGES}
    if wrong := expected ^ in_wheel:
        sys.exit(f"in the wheel or in the checkout's packages alone: {', '.join(sorted(wrong))}")
    with tempfile.TemporaryDirectory() as target:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq"]
        subprocess.run([*pip, "install", "--no-deps", "--target", target, wheels[0]], check=True)
        # -I keeps the current folder and PYTHONPATH out; the other folder is not the checkout.
        command = [sys.executable, "-I", "-c", IMPORT_CHECK, target, *PACKAGES]
        if subprocess.run(command, cwd=target).returncode:
            sys.exit("the wheel does not import")
    print(f"{wheels[0].name}: {len(in_wheel)} files, complete, and both packages import")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/check_wheel.py DIST_FOLDER")
    check(Path(sys.argv[1]))
