"""Groups of real processes on this machine, run to their end."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks._common.processes import coordinator, started, wait_for_ends

TIMEOUT = 600.0  # seconds for a group; on an idle machine it takes less than one of them in ten


def finish(
    commands: Sequence[Sequence[str]], bound: Mapping[str, str], folder: Path
) -> list[tuple[int | None, str]]:
    """Runs the commands at once; status and output of each.

    The first that fails ends all: the others would wait for it in a collective.
    """
    with started(commands, bound, folder) as group:
        wait_for_ends(group, TIMEOUT)
    return [(process.status, process.output) for process in group]


def run_group(
    folder: Path, processes: int, devices: int, cases: Sequence[tuple[str, str, dict]]
) -> dict[str, list[dict[str, np.ndarray]]]:
    """What each process returned of each case.

    Args:
      folder: for the files of the group; checkpoints are saved in it.
      processes: of the group.
      devices: of each process.
      cases: name, case of `_cases.py`, and its options.

    Raises:
      AssertionError: a process failed or took too long; with the output of all.
    """
    with coordinator() as (address, bound):
        options = {
            "coordinator": address,
            "processes": processes,
            "devices": devices,
            "cases": list(cases),
            "folder": str(folder),
        }
        worker = [sys.executable, "-m", "tests.multiprocess._worker"]
        commands = [
            [*worker, json.dumps({**options, "process": process})] for process in range(processes)
        ]
        results = finish(commands, bound, folder)
    if any(status for status, _ in results):
        raise AssertionError(
            "\n".join(f"== process {i}: status {s}\n{out}" for i, (s, out) in enumerate(results))
        )
    return {
        name: [dict(np.load(folder / f"{name}.{process}.npz")) for process in range(processes)]
        for name, _, _ in cases
    }
