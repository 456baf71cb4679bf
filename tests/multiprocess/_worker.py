"""One process of a group: `python -m tests.multiprocess._worker JSON`."""

from pathlib import Path

import jax

from tests import groups


def main() -> None:
    """Runs the cases and writes what each returns to FOLDER/CASE.PROCESS.npz."""
    options = groups.settings()
    groups.join(options, options["devices"], initialization_timeout=600)
    # Imported once the devices are set: jax starts with the first array.
    import numpy as np

    from tests.multiprocess import _cases

    assert jax.process_count() == options["processes"]
    assert jax.local_device_count() == options["devices"]
    folder = Path(options["folder"])
    for name, case, arguments in options["cases"]:
        arrays = _cases.CASES[case](_cases.mesh_of_all(), folder, **arguments)
        np.savez(folder / f"{name}.{options['index']}.npz", **arrays)
        print(f"{name} done", flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
