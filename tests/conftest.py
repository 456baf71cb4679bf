"""Eight CPU devices for every test, set once and before any of them runs."""

import hypothesis
import jax
import pytest

# The same examples at every run: a gate must not depend on luck. To look for new
# ones, run with `--hypothesis-profile default`.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
hypothesis.settings.load_profile("fixed")

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# Started here, so that no test (an example that sets its own number) starts it otherwise.
assert jax.device_count() == 8


@pytest.fixture(autouse=True, scope="module")
def _programs_of_one_file():
    """Forgets the compiled programs of a file.

    Each maps some pieces of memory, and a process may have 65,530 of them on Linux:
    a test run of thousands of programs would end in a segmentation fault.
    """
    yield
    jax.clear_caches()
