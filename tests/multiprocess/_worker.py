"""One process of a group: `python -m tests.multiprocess._worker JSON`, see `_launch.py`."""

import json
import sys
from pathlib import Path

import jax

from benchmarks._common.processes import die_with_parent


def main(options: dict) -> None:
    """Runs the cases and writes what each returns to FOLDER/CASE.PROCESS.npz."""
    die_with_parent()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options["devices"])
    jax.distributed.initialize(
        options["coordinator"],
        options["processes"],
        options["process"],
        cluster_detection_method="deactivate",  # the tests may run under SLURM
        initialization_timeout=600,
    )
    # Imported once the devices are set: jax starts with the first array.
    import numpy as np

    from tests.multiprocess import _cases

    assert jax.process_count() == options["processes"]
    assert jax.local_device_count() == options["devices"]
    mesh = _cases.mesh_of(jax.devices())
    folder = Path(options["folder"])
    for name, case, arguments in options["cases"]:
        arrays = _cases.CASES[case](mesh, folder, **arguments)
        np.savez(folder / f"{name}.{options['process']}.npz", **arrays)
        print(f"{name} done", flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
