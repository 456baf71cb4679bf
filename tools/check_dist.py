"""Checks that the built wheel and sdist are complete, and work without the checkout.

Usage: python tools/check_dist.py DIST_FOLDER

The wheel holds both packages in full, and they import from it. The sdist has every file of the
repository, and its tests run from it, as they do for somebody who packages it for a distribution:
all tests are collected, and the quick ones that only read files are run.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("sparse_collectives", "optax_ext")
# Runs in a fresh interpreter, with the folder of the unpacked wheel first on the path.
IMPORT_CHECK = """
import importlib, pathlib, sys
target = pathlib.Path(sys.argv[1]).resolve()
sys.path.insert(0, str(target))
for name in sys.argv[2:]:
    file = pathlib.Path(importlib.import_module(name).__file__).resolve()
    if not file.is_relative_to(target):
        sys.exit(f"{name} was imported from {file}, not from the wheel")
"""
# Tests of the manual, recorded results, constraints, tools, CITATION.cff and the changelog.
TESTS = (
    "test_docs.py",
    "test_docs_numbers.py",
    "test_evidence.py::test_kept_results_are_small_and_of_claims_that_there_are",
    "test_package.py",
    "test_recorded_programs.py",
    "test_reference.py",
)
# Leaves out tests that compute.
CHOSEN = ["-m", "not slow", "-k", "not docstring_examples", *(f"tests/{name}" for name in TESTS)]


def only(dist: Path, pattern: str) -> Path:
    """The one file that matches the pattern."""
    found = list(dist.glob(pattern))
    if len(found) != 1:
        sys.exit(f"expected one {pattern} in {dist}, found {len(found)}")
    return found[0]


def files_of(folder: Path) -> set[str]:
    """The files below it, without Python's compiled ones."""
    paths = [x for x in folder.rglob("*") if x.is_file() and "__pycache__" not in x.parts]
    return {path.relative_to(folder).as_posix() for path in paths}


def check_wheel(wheel: Path) -> None:
    """Raises SystemExit with one line if the wheel is incomplete or does not import."""
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {name for name in archive.namelist() if ".dist-info/" not in name}
    # Without py.typed type checkers would ignore the packages.
    expected = {
        f"{name}/{file}" for name in PACKAGES for file in (*files_of(ROOT / name), "py.typed")
    }
    if wrong := expected ^ in_wheel:
        sys.exit(f"in the wheel or in the checkout's packages alone: {', '.join(sorted(wrong))}")
    with tempfile.TemporaryDirectory() as target:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq"]
        subprocess.run([*pip, "install", "--no-deps", "--target", target, wheel], check=True)
        # -I keeps the current folder and PYTHONPATH out; the other folder is not the checkout.
        command = [sys.executable, "-I", "-c", IMPORT_CHECK, target, *PACKAGES]
        if subprocess.run(command, cwd=target).returncode:
            sys.exit("the wheel does not import")
    print(f"{wheel.name}: {len(in_wheel)} files, complete, and both packages import")


def tracked() -> set[str]:
    """The files of the repository; none if this is not a checkout."""
    if shutil.which("git") is None:
        return set()
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    listed = subprocess.run(command, capture_output=True, text=True).stdout
    # Deleted files stay in the index until the deletion is committed.
    return {name for name in listed.split("\0") if name and (ROOT / name).is_file()}


def check_sdist(sdist: Path) -> None:
    """Raises SystemExit with the reason if the sdist is incomplete or its tests fail."""
    with tempfile.TemporaryDirectory() as target, tarfile.open(sdist) as archive:
        archive.extractall(target, filter="data")
        (folder,) = Path(target).iterdir()
        if missing := sorted(tracked() - files_of(folder)):
            sys.exit(f"missing from the sdist: {', '.join(missing)}")
        # The path goes before the checkout, which is installed in editable form.
        more = {"PYTHONPATH": str(folder), "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache/jax")}
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        given = {"cwd": folder, "env": os.environ | more, "capture_output": True, "text": True}
        for options in (["--collect-only"], CHOSEN):
            done = subprocess.run([*pytest, *options], **given)
            if done.returncode:
                sys.exit(f"{done.stdout[-4000:]}{done.stderr}\nthe sdist's tests failed")
            print(f"{folder.name}: {done.stdout.splitlines()[-1].strip('= ')}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/check_dist.py DIST_FOLDER")
    check_wheel(only(Path(sys.argv[1]), "*.whl"))
    check_sdist(only(Path(sys.argv[1]), "*.tar.gz"))
