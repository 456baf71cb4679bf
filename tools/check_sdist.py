"""Checks that the sdist has every file of the repository, and that its tests run from it.

Usage: python tools/check_sdist.py DIST_FOLDER

Who packages it for a distribution tests what is in it. All tests are collected, and those are run
that read files and are quick about it.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What reads the manual, recorded results, constraints, tools, CITATION.cff and the changelog.
TESTS = (
    "test_docs.py",
    "test_evidence.py::test_kept_results_are_small_and_of_claims_that_there_are",
    "test_gpu_programs.py",
    "test_package.py",
    "test_reference.py",
)
# Not what computes.
CHOSEN = ["-m", "not slow", "-k", "not docstring_examples", *(f"tests/{name}" for name in TESTS)]


def tracked() -> set[str]:
    """The files of the repository; none where this is not a checkout."""
    if shutil.which("git") is None:
        return set()
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    listed = subprocess.run(command, capture_output=True, text=True).stdout
    # Deleted files stay in the index until that is committed.
    return {name for name in listed.split("\0") if name and (ROOT / name).is_file()}


def check(dist: Path) -> None:
    """Raises SystemExit with the reason when the sdist in `dist` is not what it should be."""
    sdists = list(dist.glob("*.tar.gz"))
    if len(sdists) != 1:
        sys.exit(f"expected one sdist in {dist}, found {len(sdists)}")
    with tempfile.TemporaryDirectory() as target, tarfile.open(sdists[0]) as archive:
        archive.extractall(target, filter="data")
        (folder,) = Path(target).iterdir()
        files = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
        if missing := sorted(tracked() - files):
            sys.exit(f"missing from the sdist: {', '.join(missing)}")
        # The path goes before that of the checkout, which is installed in editable form.
        more = {"PYTHONPATH": str(folder), "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache/jax")}
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        for options in (["--collect-only"], CHOSEN):
            done = subprocess.run(
                [*pytest, *options],
                cwd=folder,
                env=os.environ | more,
                capture_output=True,
                text=True,
            )
            if done.returncode:
                sys.exit(f"{done.stdout[-4000:]}{done.stderr}\nthe sdist's tests failed")
            print(f"{folder.name}: {done.stdout.splitlines()[-1].strip('= ')}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/check_sdist.py DIST_FOLDER")
    check(Path(sys.argv[1]))
