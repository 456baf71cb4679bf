"""Eight CPU devices for every test, set once and before any of them runs."""

import collections
import contextlib
import functools
import gc
import hashlib
import itertools
import math
import pathlib

import hypothesis
import jax
import optax
import pytest

from benchmarks._common import namespaces

# The same examples at every run: a gate must not depend on luck. To look for new
# ones, run with `--hypothesis-profile default`.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
hypothesis.settings.load_profile("fixed")

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# No type changes and no array is repeated unless the code says so: silent promotion and
# broadcasting are errors, in the library and in the oracles.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# It starts here, before a test (an example that sets its own number) starts it differently.
assert jax.device_count() == 8


def _with_standard_promotion(function):
    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        with jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return wrapped


# Optax raises a float to the power of the integer count of its steps, and multiplies integers and
# floats by booleans.
optax.tree.bias_correction = _with_standard_promotion(optax.tree.bias_correction)
# It multiplies a float by the sign of an integer.
_piecewise_constant = optax.piecewise_constant_schedule
optax.piecewise_constant_schedule = lambda *args, **kwargs: _with_standard_promotion(
    _piecewise_constant(*args, **kwargs)
)
optax.MultiSteps.update = _with_standard_promotion(optax.MultiSteps.update)


@pytest.fixture(scope="module")
def default_promotion():
    """For users' programs and models of other libraries, which add biases to rows."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def usable():
    """Skips if no network can be made, which requires Linux, root, ip, tc and namespaces."""
    reason = namespaces.unusable()
    if reason is not None:
        pytest.skip(reason)


# A compiled program maps hundreds of pieces of memory, and Linux lets a process have
# 65,530: a run of thousands of programs would end in a segmentation fault.
_MANY_MAPS = 20_000
_tests = itertools.count()


def _forget_programs():
    # None of them may still be running. An array of a failed program raises its error.
    for array in jax.live_arrays():
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            array.block_until_ready()
    jax.clear_caches()


@pytest.fixture(autouse=True, scope="module")
def _programs_of_a_file():
    """Forgets them at its end: with gigabytes of them all others take ten times as long."""
    yield
    _forget_programs()
    gc.collect()


@pytest.fixture(autouse=True)
def _not_too_many_programs():
    yield
    maps = pathlib.Path("/proc/self/maps")
    if next(_tests) % 16 == 0 and maps.exists() and maps.read_bytes().count(b"\n") > _MANY_MAPS:
        _forget_programs()


def pytest_addoption(parser):
    parser.addoption(
        "--one-in",
        type=int,
        default=1,
        metavar="N",
        help="of the slow cases of each file one in N, always the same ones",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks the slow cases, and runs 1/N of them in each file with ``--one-in=N``."""
    _mark_slow_cases(items)
    files = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow"):
            files[item.path].append(item)
    left_out = set()
    for cases in files.values():
        left_out.update(_in_turns(cases)[math.ceil(len(cases) / config.getoption("--one-in")) :])
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _in_turns(cases):
    """First a case of each function, then a second one of each; in the order of a hash."""
    ranked = sorted(cases, key=lambda item: hashlib.sha256(item.nodeid.encode()).digest())
    counts = collections.Counter()
    turns = []
    for item in ranked:
        function = item.nodeid.split("[")[0]
        turns.append(counts[function])
        counts[function] += 1
    return [item for _, item in sorted(zip(turns, ranked, strict=True), key=lambda x: x[0])]


def _mark_slow_cases(items):
    """Every n-th case of a test that is marked ``one_in(n)`` stays among the quick ones."""
    counts = collections.Counter()
    for item in items:
        if mark := item.get_closest_marker("one_in"):
            function = item.nodeid.split("[")[0]
            if counts[function] % mark.args[0] and not item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.slow)
            counts[function] += 1


def _may_leave_something(item):
    marks = item.iter_markers("filterwarnings") if item is not None else ()
    return any("PytestUnraisableExceptionWarning" in x for mark in marks for x in mark.args)


def pytest_runtest_teardown(item, nextitem):
    """Collects garbage after a test that ignores pytest's warning of unraisable exceptions.

    Orbax drops the reads that are under way when another one fails, and Python reports them
    when they are collected. That must not happen in a later test.
    """
    if _may_leave_something(item) and not _may_leave_something(nextitem):
        gc.collect()
