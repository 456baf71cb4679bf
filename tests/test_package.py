"""The packages as a user imports them."""

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.version import Version

import optax_ext
import sparse_collectives

PACKAGES = [
    sparse_collectives,
    sparse_collectives.allreduce,
    sparse_collectives.cost_model,
    sparse_collectives.select,
    sparse_collectives.traffic,
    sparse_collectives.transport,
    sparse_collectives.wire,
    optax_ext,
]


def modules():
    for package in (sparse_collectives, optax_ext):
        yield package.__name__
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            yield info.name


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.__name__)
def test_all_is_complete_and_sorted(package):
    public = {
        name
        for name, value in vars(package).items()
        if not name.startswith("_")
        and (not isinstance(value, type(sys)) or name in package.__all__)
    }
    assert set(package.__all__) - {"__version__"} == public
    assert package.__all__ == sorted(package.__all__)


# They are written as users write, to whom JAX promotes.
@pytest.mark.usefixtures("default_promotion")
@pytest.mark.parametrize("name", list(modules()))
def test_docstring_examples_run(name):
    failures, _ = doctest.testmod(importlib.import_module(name), verbose=False)
    assert failures == 0


def test_the_oldest_versions_that_are_tested_are_the_stated_minimums():
    root = Path(__file__).parents[1]
    stated = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    minimums = {name: Version(least) for name, least in (line.split(">=") for line in stated)}
    text = (root / "constraints" / "oldest.txt").read_text()
    pinned = re.findall(r"^(\w+)==([\d.]+?)(?:\.\*)?(?:;.*)?$", text, re.MULTILINE)
    assert {name: Version(version) for name, version in pinned} == minimums


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_sparse_collectives_needs_only_jax_and_numpy():
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('optax', 'flax', 'optax_ext', 'mpi4jax', 'chex'):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import sparse_collectives
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_importing_starts_no_backend():
    code = """
import sparse_collectives, optax_ext
import jax
jax.config.update("jax_num_cpu_devices", 3)  # an error once a backend has started
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
