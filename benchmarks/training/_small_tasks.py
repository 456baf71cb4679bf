"""Images to classify and text to continue, as tasks of _simulated_training."""

import jax
import jax.numpy as jnp
import numpy as np

from examples._data import Dataset

from .._common.options import InputError
from ._simulated_training import Task
from ._small_models import CONTEXT, WIDTH, Network, loss_of, transformer

# Measured at once, to bound the memory.
_PART = 500


def image_task(data: Dataset, network: Network) -> Task:
    """The accuracy on all test images."""

    @jax.jit
    def right(params, images, labels):
        return jnp.sum(jnp.argmax(network.apply(params, images), -1) == labels)

    def evaluate(params):
        test = len(data.test_labels)
        counts = [
            int(
                right(
                    params,
                    data.test_images[start : start + _PART],
                    data.test_labels[start : start + _PART],
                )
            )
            for start in range(0, test, _PART)
        ]
        return sum(counts) / test

    return Task(
        "images",
        network.init,
        loss_of(network),
        lambda chosen: (data.train_images[chosen], data.train_labels[chosen]),
        len(data.train_labels),
        evaluate,
        once=True,
    )


def text_task(text: str, *, windows: int = 256, width: int = WIDTH) -> Task:
    """The loss on the last tenth of the text, in nats for a character.

    Args:
      text: to learn.
      windows: of the held-out part, evenly spread, which are measured.
      width: of the network.

    Raises:
      InputError: the text is too short.
    """
    alphabet, code = np.unique(np.array(list(text)), return_inverse=True)
    cut = len(code) * 9 // 10
    if len(code) - cut < 2 * CONTEXT:
        raise InputError(f"the text has {len(code)} characters, at least {20 * CONTEXT} are needed")
    network = transformer(len(alphabet), width)
    loss = loss_of(network)

    def windows_at(part, starts):
        found = part[starts[..., None] + np.arange(CONTEXT + 1)]
        return found[..., :-1], found[..., 1:]

    code = code.astype(np.int32)
    starts = np.linspace(0, len(code) - cut - CONTEXT - 1, windows, dtype=np.int32)
    held_out = windows_at(code[cut:], starts)
    part = min(64, windows)

    @jax.jit
    def measured(params):
        parts = [jnp.asarray(x.reshape(-1, part, CONTEXT)) for x in held_out]
        return jax.lax.map(lambda batch: loss(params, batch), tuple(parts)).mean()

    return Task(
        "text",
        network.init,
        loss,
        lambda chosen: windows_at(code[:cut], chosen),
        cut - CONTEXT,
        lambda params: float(measured(params)),
        once=False,
    )
