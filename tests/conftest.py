"""Eight CPU devices for every test, set once and before any of them runs."""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# Started here, so that no test (an example that sets its own number) starts it otherwise.
assert jax.device_count() == 8
