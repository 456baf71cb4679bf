"""Prints the path of the newest Python on this machine that can make a virtual environment.

Usage: python tools/newest_python.py [PYTHON]

With PYTHON, only that one is tried. Each candidate is run: a name on the PATH may be a stand-in
(pyenv's) for an interpreter that is not selected.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# jax 0.11 was the first version that Python 3.11 can't run.
OLDEST = (3, 12)
NAME = "python3.[1-9][0-9]"
# Folders of interpreters that are not on the PATH: pyenv's, uv's, Homebrew's.
FOLDERS = (
    ("~/.pyenv/versions", f"*/bin/{NAME}"),
    ("~/.local/share/uv/python", f"*/bin/{NAME}"),
    ("/opt/homebrew/bin", NAME),
    ("/usr/local/bin", NAME),
)
# It must have venv, which some distributions split off, and be a release, or there are no wheels.
PROBE = """
import ensurepip, json, sys, sysconfig, venv
free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
released = sys.version_info.releaselevel == "final"
print(json.dumps([*sys.version_info[:3], released and not free_threaded]))
"""


def candidates() -> Iterator[str]:
    """Paths of possible interpreters."""
    for folder, pattern in (*((folder, NAME) for folder in os.get_exec_path()), *FOLDERS):
        yield from map(str, Path(folder).expanduser().glob(pattern))


def version_of(python: str) -> tuple[int, ...] | None:
    """The version of an interpreter; None if it does not run or is unsuitable."""
    try:
        done = subprocess.check_output(
            [python, "-I", "-c", PROBE], stderr=subprocess.DEVNULL, timeout=60
        )
        *version, ordinary = json.loads(done)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return tuple(version) if ordinary and tuple(version) >= OLDEST else None


if __name__ == "__main__":
    tried = sys.argv[1:] or list(dict.fromkeys(candidates()))
    found = {version_of(shutil.which(python) or python): python for python in reversed(tried)}
    found.pop(None, None)
    if not found:
        wanted = (
            f"no Python {OLDEST[0]}.{OLDEST[1]} or newer that works was found, which the newest"
        )
        advice = "jax needs. Install one, or set NEWEST_PYTHON=/path/to/python3.13. Tried:"
        sys.exit(f"{wanted} {advice} {', '.join(tried) or 'nothing, as none is on the PATH'}.")
    print(found[max(found)])
