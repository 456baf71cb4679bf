"""Writes docs/works_with.md from the table that the tests run, tests/optax_ext/combinations.py."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "works_with.md"

_HEAD = """# What it works with

For AdamW begin with `optax_ext.sparse_adamw(rate, axis="data")`, and for SGD with momentum m with
`optax_ext.ok_topk_sgd(rate / (1 - m), density=0.01, axis="data")`. Each stands for a whole
optimizer, and can be put where this page has a chain. A row here says that a combination works, not
that it learns as well: on a transformer a plain sparse allreduce in front of Adam ended furthest
from dense, while on word embeddings it was level ([learning.md](learning.md)).

This page is written by `python tools/combination_matrix.py` from
`tests/optax_ext/combinations.py`. `tests/optax_ext/test_works_with.py` evaluates the code of each
row as it stands here and trains with it for 4 steps on 8 workers. In the code `reduce` is the
sparse allreduce, `optax_ext.ok_topk(density=0.1, axis="data")` or any other, and `dense` is
`optax_ext.dense(axis="data")`.

For every row it is checked that

- at density 1 (with `topk_a`) the parameters are those of the dense allreduce in its place, to
  rounding;
- at density 0.1 (with `ok_topk` in the rows with pmap and simulate, with `topk_a` in the others)
  the parameters have the same bits on every worker;
- what went into the allreduce is what came out of it plus the residuals, to rounding: nothing is
  lost;
- the loss is traced once for all steps.

That is under `jax.shard_map` with `check_vma=True`, by `optax_ext.make_train_step`. Rows with
pmap or simulate are run there too, at density 0.1: the parameters are the same, and have the same
bits on every worker. In rows with sharded, matrices are sharded over two devices of each of four
workers ([sharded.md](sharded.md)): at density 1 the parameters are those of the dense allreduce of
whole ones, and they stay where they were.
"""

_TAIL = """
## Dropout, and other random numbers

A key that a loss closes over is a constant of the program: one mask for ever, and no error. Give
the keys in the batch, one for each worker and new ones at each step; the loss is given those of
its worker:

```python
def loss_with_dropout(params, batch):
    x, y, keys = batch
    keep = jax.random.bernoulli(keys[0], 0.9, x.shape)
    return loss_fn(params, (jnp.where(keep, x / 0.9, 0.0), y))


step = optax_ext.make_train_step(loss_with_dropout, tx, mesh)
for number, (x, y) in enumerate(batches):
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), number), 8)  # of 8 workers
    params, opt_state, loss = step(params, opt_state, (x, y, keys))
```

A number for each step, such as a temperature, goes the same way: `jnp.full(8, x)` in the batch,
and `[0]` in the loss.

## TrainState and nnx.Optimizer

`TrainState.create` and `nnx.Optimizer` of flax call `tx.init(params)` by themselves. It makes the
state of all workers under `jax.set_mesh(mesh)`, and so it does anywhere if the transformation has
been given the mesh once, as `optax_ext.with_mesh(tx, mesh)`:

```python
from flax.training import train_state

state = train_state.TrainState.create(
    apply_fn=model.apply, params=params, tx=optax_ext.with_mesh(tx, mesh)
)
step = optax_ext.make_train_step(loss_fn, tx, mesh)
for batch in batches:
    params, opt_state, loss = step(state.params, state.opt_state, batch)
    state = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
```

Inside `jax.pmap`, `create` and `apply_gradients` work as they are:

```python
from flax import jax_utils


def create(params):
    return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def local_step(state, batch):
    here = optax_ext.ahead(state.params, state.opt_state)
    return state.apply_gradients(grads=jax.grad(loss_fn)(here, batch))  # no pmean


state = jax.pmap(create, axis_name="data")(jax_utils.replicate(params))
step = jax.pmap(local_step, axis_name="data")
for batch in batches:
    state = step(state, jax.tree.map(lambda x: x.reshape(8, -1, *x.shape[1:]), batch))
```

An `nnx.Optimizer` is a pytree, and `optax_ext.state_specs` takes it as it is. In a step of your own
it is updated with the gradients of one worker:

```python
from flax import nnx
from jax.sharding import PartitionSpec as P

network = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(
    network, optax_ext.with_mesh(optax_ext.sparse_adamw(1e-2, axis="data"), mesh), wrt=nnx.Param
)
specs = optax_ext.state_specs(optimizer)


def local_nnx_step(network, optimizer, batch):
    graph, params = nnx.split(network, nnx.Param)

    def loss(params):
        return jnp.mean((nnx.merge(graph, params)(batch) - 1.0) ** 2)

    gradients = jax.grad(loss)(optax_ext.ahead(params, optimizer.opt_state))
    optimizer.update(network, gradients)
    return network, optimizer


nnx_step = jax.jit(
    jax.shard_map(
        local_nnx_step, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs)
    )
)
network, optimizer = nnx_step(network, optimizer, jnp.ones((8, 4)))
```

## What may be behind a whole optimizer

The updates of `sparse_adamw`, `sparse_sgd` and `ok_topk_sgd` are steps of the parameters, rate
and sign included. Behind them, `clip`, `ema`, `keep_params_nonnegative`, `apply_if_finite`, masks
and `scale` by a positive number work. Another optimizer would take a step for a gradient, turn it
round and train uphill: `init_state` and `make_train_step` raise an error where they see that, in
a step that they try with small parameters. Under `pmap` and `simulate`, with a state that is made
there, there is no such check.

## What has to be behind the allreduce

In front of the allreduce, or around it, a transformation sees the gradients of one worker.

- One that decides by them (`apply_if_finite`, the `should_skip_update_fn` of `MultiSteps`) may
  decide otherwise on another worker, and the workers then wait for each other for ever.
  `init_state`, `make_train_step` and `state_specs` raise an error for those that come with optax.
  Under `pmap` and `simulate` there is no such check. A function of your own has to agree, for
  example by `jax.lax.psum`.
- One that keeps something of them (`trace`, `ema`, `apply_every`, `zero_nans`,
  `contrib.mechanize`) has a state, or updates, that differ between the workers. `make_train_step`
  raises an error that names them. Give it to the sparse allreduce as `local=`, which keeps its
  state for each worker; or use `optax_ext.momentum_correction`, `optax_ext.multi_steps` and
  `nonfinite="drop"`.
- One without a state (`clip`, `scale`) works in front.

## A model of flax nnx with BatchNorm and Dropout

The running statistics of BatchNorm are no parameters: they go through the step beside them, and
their mean over the workers is kept. A dropout key comes with each step, and each worker makes its
own of it. `copy=True` gives the loss variables that it may change. A test runs this as it stands;
`mesh`, and `batches` of `(x, y)`, are yours.

```python
import jax, jax.numpy as jnp, optax, optax_ext
from flax import nnx
from jax.sharding import PartitionSpec as P


class Model(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(6, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.2)
        self.out = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x, rngs=None):
        x = nnx.relu(self.norm(self.hidden(x)))
        return self.out(self.dropout(x, rngs=rngs))


graph, params, stats = nnx.split(Model(nnx.Rngs(0)), nnx.Param, nnx.BatchStat)
tx = optax_ext.sparse_adamw(1e-2, axis="data")
opt_state = optax_ext.init_state(tx, params, mesh)
specs = optax_ext.state_specs(opt_state)


def loss_fn(params, stats, batch, key):
    model = nnx.merge(graph, params, stats, copy=True)
    x, y = batch
    loss = jnp.mean((model(x, rngs=nnx.Rngs(dropout=key)) - y) ** 2)
    return loss, nnx.state(model, nnx.BatchStat)


def local_step(params, stats, opt_state, batch, key):
    key = jax.random.fold_in(key, jax.lax.axis_index("data"))  # other masks on each worker
    at = optax_ext.ahead(params, opt_state)
    (loss, stats), gradients = jax.value_and_grad(loss_fn, has_aux=True)(at, stats, batch, key)
    updates, opt_state = tx.update(gradients, opt_state, params)
    loss, stats = jax.lax.pmean((loss, stats), "data")
    return optax.apply_updates(params, updates), stats, opt_state, loss


step = jax.jit(
    jax.shard_map(
        local_step,
        mesh=mesh,
        in_specs=(P(), P(), specs, P("data"), P()),
        out_specs=(P(), P(), specs, P()),
    ),
    donate_argnums=(0, 1, 2),
)
for number, batch in enumerate(batches):
    key = jax.random.fold_in(jax.random.key(0), number)
    params, stats, opt_state, loss = step(params, stats, opt_state, batch, key)
    jax.block_until_ready(loss)
model = nnx.merge(graph, params, stats)
model.eval()  # running statistics, no dropout
```

## A float16 allreduce

Half the bytes of the dense allreduce, without a residual. Gradients that float16 cannot hold (above
65,504, or below 6e-8) become infinite or 0. On a CPU bfloat16 gains nothing, since XLA widens it
before it adds up.

```python
def cast(dtype):
    return optax.stateless(lambda tree, _: jax.tree.map(lambda x: x.astype(dtype), tree))


dense16 = optax.chain(cast(jnp.float16), optax_ext.dense(axis="data"), cast(jnp.float32))
tx = optax.chain(dense16, optax.adamw(1e-3))
```
"""


def page() -> str:
    """The text of the page."""
    from tests.optax_ext import combinations

    lines, group = [_HEAD], None
    for row in combinations.ROWS:
        if row.group != group:
            group = row.group
            lines.append(f"## {group}\n")
            lines.append("| combination | how to write it | tested in | notes |")
            lines.append("|---|---|---|---|")
        how = f"`{row.code}`" + (f"; {row.how}" if row.how else "")
        modes = ", ".join(("shard_map", *row.also, *(("sharded",) if row.sharded else ())))
        lines.append(f"| {row.name} | {how} | {modes} | {row.note} |")
        following = combinations.ROWS[combinations.ROWS.index(row) + 1 :]
        if not following or following[0].group != group:
            lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n" + _TAIL


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(page())
