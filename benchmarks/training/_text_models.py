"""Two more networks of text in plain JAX: an LSTM of characters, and a network of words.

Most parameters of the network of words are in two tables, one for its input words and one for its
output words. A batch has a gradient for few of their rows: the rows of its words, and the rows of
the groups that contain the words to predict. For this the softmax has two levels, the group and the
word in it, so both tables have sparse gradients, with no sampling and an exact loss.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._small_models import Network, affine, forgetful, layer, normal, recurrence

# The LSTM: entries of an embedded character, and cells.
ENTRIES, CELLS = 32, 80
# The network of words: entries of each word, how many words precede the predicted one, and how
# many are predicted in a window.
WIDTH, BEFORE, FOUND = 32, 4, 8
# Groups, and words in each.
GROUPS, MEMBERS = 64, 64
VOCABULARY = GROUPS * MEMBERS
# The characters, or words, of a window, without the last.
WORDS = BEFORE + FOUND - 1
# Steps of the recurrence in one turn of the loop.
_UNROLL = 4


class Scored(NamedTuple):
    """Parameters by ``init(seed)``; the mean negative log-likelihood by ``loss(params, batch)``."""

    init: Any
    loss: Any


def lstm(vocabulary: int, cells: int = CELLS, entries: int = ENTRIES, layers: int = 1) -> Network:
    """Layers of an LSTM between an embedding and an output layer."""
    # With several layers, entries of matrices have the deviation of uniform ones in [-s, s].
    gain = 1.0 if layers == 1 else 3**-0.5

    def init(seed):
        random = np.random.default_rng(seed)
        params = {"embedding": normal(random, (vocabulary, entries), 1.0)}
        for i in range(layers):
            inputs = cells if i else entries
            params[f"lstm_{i}"] = {
                "input": normal(random, (inputs, 4 * cells), gain * inputs**-0.5),
                "recurrent": normal(random, (cells, 4 * cells), gain * cells**-0.5),
                "bias": forgetful(cells),
            }
        return params | {"output": layer(random, (cells, vocabulary), gain * cells**-0.5)}

    def apply(params, tokens):
        x = params["embedding"][tokens].swapaxes(0, 1)
        for i in range(layers):
            part = params[f"lstm_{i}"]
            x = recurrence(x @ part["input"] + part["bias"], part["recurrent"], _UNROLL)
        return affine(params["output"], x.swapaxes(0, 1))

    return Network(init, apply)


def words(width: int = WIDTH) -> Scored:
    """Maps the entries of the preceding words through a hidden layer to the next word.

    Words are numbered by frequency, so that a group has words of about one frequency.
    """

    def init(seed):
        random = np.random.default_rng(seed)
        return {
            "embedding": normal(random, (VOCABULARY, width), 0.1),
            "hidden": layer(random, (BEFORE * width, 2 * width), (BEFORE * width) ** -0.5),
            "state": layer(random, (2 * width, width), (2 * width) ** -0.5),
            "group": layer(random, (width, GROUPS), width**-0.5),
            "members": normal(random, (GROUPS, MEMBERS, width), 0.1 * width**-0.5),
        }

    def loss(params, batch):
        inputs, labels = batch[0], batch[1][:, BEFORE - 1 :]
        x = params["embedding"][inputs]
        x = jnp.concatenate([x[:, i : i + FOUND] for i in range(BEFORE)], axis=-1)
        x = affine(params["state"], jax.nn.gelu(affine(params["hidden"], x)))
        group, member = labels // MEMBERS, labels % MEMBERS
        inside = jnp.einsum("bfmw,bfw->bfm", params["members"][group], x)
        score = optax.softmax_cross_entropy_with_integer_labels
        return (score(affine(params["group"], x), group) + score(inside, member)).mean()

    return Scored(init, loss)
