"""Eight CPU devices for every test, set once and before any of them runs."""

import hypothesis
import jax

# The same examples at every run: a gate must not depend on luck. To look for new
# ones, run with `--hypothesis-profile default`.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
hypothesis.settings.load_profile("fixed")

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# Started here, so that no test (an example that sets its own number) starts it otherwise.
assert jax.device_count() == 8
