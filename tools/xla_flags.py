"""Prints the given XLA flags that this jaxlib accepts.

XLA aborts the process at an unknown flag, and flags come and go from release to release. So each
is tried in a process of its own. Without a file that keeps the answer, or after a change of the
jaxlib version, that takes a second or two a flag.

    python tools/xla_flags.py .venv/.xla-flags --xla_backend_optimization_level=0
"""

import importlib.metadata
import os
import pathlib
import subprocess
import sys

# The flags are parsed when the first backend starts.
_START = "import jax; jax.config.update('jax_platforms', 'cpu'); jax.devices()"


def _is_accepted(flag: str) -> bool:
    environment = {**os.environ, "XLA_FLAGS": flag}
    done = subprocess.run([sys.executable, "-c", _START], env=environment, capture_output=True)
    return done.returncode == 0


if __name__ == "__main__":
    kept, flags = pathlib.Path(sys.argv[1]), sys.argv[2:]
    question = " ".join((importlib.metadata.version("jaxlib"), *flags))
    lines = kept.read_text().splitlines() if kept.exists() else []
    if lines[:1] != [question]:
        lines = [question, " ".join(filter(_is_accepted, flags))]
        kept.write_text("\n".join(lines) + "\n")
    print(lines[1])
