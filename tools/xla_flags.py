"""Prints those of the XLA flags given that this jaxlib accepts.

XLA aborts the process at a flag it does not know, and flags come and go from release to release.
So each is tried in a process of its own. Without a file to keep the answer in, or when the
version of jaxlib has changed since, that takes a second or two a flag.

    python tools/xla_flags.py .venv/.xla-flags --xla_backend_optimization_level=0
"""

import importlib.metadata
import os
import pathlib
import subprocess
import sys

# The flags are parsed when the first backend starts.
_START = "import jax; jax.config.update('jax_platforms', 'cpu'); jax.devices()"


def accepted(flags: list[str]) -> list[str]:
    """The flags that do not end a process."""
    return [flag for flag in flags if _runs_with(flag)]


def _runs_with(flag: str) -> bool:
    environment = {**os.environ, "XLA_FLAGS": flag}
    done = subprocess.run([sys.executable, "-c", _START], env=environment, capture_output=True)
    return done.returncode == 0


def main(path: str, *flags: str) -> None:
    """Prints the accepted flags in one line, from the file if it answers this question."""
    kept = pathlib.Path(path)
    question = " ".join((importlib.metadata.version("jaxlib"), *flags))
    lines = kept.read_text().splitlines() if kept.exists() else []
    if lines[:1] != [question]:
        lines = [question, " ".join(accepted(list(flags)))]
        kept.write_text("\n".join(lines) + "\n")
    print(lines[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
