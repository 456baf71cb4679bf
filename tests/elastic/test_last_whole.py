"""The programs of docs/faults.md that save checkpoints and go on from the newest whole one."""

import re

import jax
import numpy as np
import optax
import pytest

import optax_ext
from tests.optax_ext.helpers import DOCS, mesh

pytestmark = pytest.mark.usefixtures("default_promotion")


def program(part):
    """The program of the page that has this in it."""
    programs = re.findall(r"```py(?:thon)?\n(.*?)```", (DOCS / "faults.md").read_text(), re.DOTALL)
    (found,) = (x for x in programs if part in x)
    return found


@pytest.mark.slow
# A read that has failed leaves work behind, on which Python reports at any later time.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_newest_whole_checkpoint_goes_on_with_other_workers(tmp_path, capsys):
    tx = optax.chain(optax_ext.topk_a(0.05, axis="data"), optax.sgd(0.1))
    names = {"jax": jax, "optax_ext": optax_ext, "tx": tx, "folder": tmp_path}
    saved = {}
    for number in (10, 20):
        params = {"w": np.full((64, 96), number, np.float32)}
        sparse, *rest = optax_ext.init_state(tx, params, mesh(4))
        rows = np.random.default_rng(number).integers(-99, 99, sparse.residual.shape)
        place = sparse.residual.sharding
        sparse = sparse._replace(residual=jax.device_put(np.float32(rows), place))
        names |= {"params": params, "opt_state": (sparse, *rest)}
        exec(program("checkpoint_metadata").replace("10", str(number)), names)
        saved[number] = rows.sum(0)
    largest = max((tmp_path / "20").rglob("*"), key=lambda x: x.is_file() and x.stat().st_size)
    content = bytearray(largest.read_bytes())
    # More than one: the files differ between runs, and a byte may belong to no array.
    content[::50] = bytes(x ^ 4 for x in content[::50])
    largest.write_bytes(content)

    names["mesh"] = mesh(3)
    exec(program("of_old_workers"), names)
    assert "checkpoint 20 is damaged: " in capsys.readouterr().out
    assert (np.asarray(names["params"]["w"]) == 10).all()
    residual = optax_ext.get_state(names["opt_state"]).residual
    assert residual.shape[0] == 3
    np.testing.assert_array_equal(np.asarray(residual).sum(0), saved[10])
