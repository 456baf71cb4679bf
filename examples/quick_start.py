"""The program of the quick start: a small classifier on eight devices of the CPU.

    python examples/quick_start.py

docs/quick-start.md continues from here.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import optax_ext

# Before jax starts. On a machine with accelerators, remove both lines and change the 8 below.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

STEPS, BATCH = 300, 128  # 8 divides the batch: each worker takes its part of it

rng = np.random.default_rng(0)
images, labels = load_digits(return_X_y=True)
order = rng.permutation(len(labels))
images, labels = (images[order] / 16).astype(np.float32), labels[order].astype(np.int32)


def logits_of(params, x):
    """A perceptron with one hidden layer."""
    return jax.nn.relu(x @ params["hidden"] + params["bias"]) @ params["out"]


def loss_fn(params, batch):
    """The mean over the given examples."""
    x, y = batch
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, x), y).mean()


params = {
    "hidden": rng.normal(0, 64**-0.5, (64, 256)).astype(np.float32),
    "bias": np.zeros(256, np.float32),
    "out": rng.normal(0, 256**-0.5, (256, 10)).astype(np.float32),
}
mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
tx = optax_ext.sparse_adamw(3e-3, axis="data")
opt_state = optax_ext.init_state(tx, params, mesh)
step = optax_ext.make_train_step(loss_fn, tx, mesh)

for number in range(1, STEPS + 1):
    rows = rng.choice(1400, BATCH, replace=False)  # the other 397 digits are for the test
    params, opt_state, loss = step(params, opt_state, (images[rows], labels[rows]))
    if number % 100 == 0:
        info = optax_ext.get_info(opt_state)
        print(f"step {number}: loss {loss:.4f}, {info.words:,.0f} words to each worker")

right = jnp.argmax(logits_of(params, images[1400:]), -1) == labels[1400:]
print(f"test accuracy {right.mean():.1%}")
