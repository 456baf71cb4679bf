"""One site's JAX process with several devices, over which its parameters are sharded."""

from typing import Any

from . import _gloo, _protocol


class Worker:
    """The training steps of one model, sharded in one way; one state for each method."""

    def __init__(self, config: dict[str, Any]):
        import jax
        import numpy as np
        from jax.sharding import AxisType, NamedSharding, PartitionSpec

        sites, inside, width = config["workers"], config["devices"], config["width"]
        auto = (AxisType.Auto,) * 2
        self._mesh = jax.make_mesh((sites, inside), ("site", "model"), axis_types=auto)
        self.barrier = _gloo.barrier(self._mesh)
        random = np.random.default_rng(config["seed"])
        specs = {}
        host = {}
        for layer in range(config["layers"]):
            for name, shape, tensor in (
                (f"up{layer}", (width, 4 * width), PartitionSpec(None, "model")),
                (f"down{layer}", (4 * width, width), PartitionSpec("model")),
            ):
                fsdp = PartitionSpec("model")
                specs[name] = fsdp if config["layout"] == "fsdp" else tensor
                scale = np.float32(shape[0] ** -0.5)
                host[name] = random.standard_normal(shape, np.float32) * scale

        def place(name: str) -> Any:
            where = NamedSharding(self._mesh, specs[name])
            whole = host[name]
            return jax.make_array_from_callback(whole.shape, where, lambda at: whole[at])

        self._params = {name: place(name) for name in host}
        spec = ("site", "model") if config["layout"] == "fsdp" else "site"
        self._batch_spec = PartitionSpec(spec)
        rows = random.standard_normal((config["batch"], width), np.float32)
        where = NamedSharding(self._mesh, self._batch_spec)
        self._batch = jax.make_array_from_callback(rows.shape, where, lambda at: rows[at])
        self._config = config
        self._methods: dict[str, Any] = {}
        self.barrier()

    def prepare(self, method: str, warmup: int) -> dict[str, Any]:
        """Compiles a method's step and takes some; says how many parameters there are."""
        import jax
        import jax.numpy as jnp
        import optax

        import optax_ext

        density, layers = self._config["density"], self._config["layers"]

        def loss(params: Any, x: Any) -> Any:
            y = x
            for layer in range(layers):
                y = y + jnp.tanh(y @ params[f"up{layer}"]) @ params[f"down{layer}"]
            return jnp.mean((y - jnp.roll(x, 1, axis=1)) ** 2)

        tx = {
            "dense": lambda: optax.chain(optax_ext.dense(axis="site"), optax.adamw(1e-3)),
            "ok_topk": lambda: optax.chain(
                optax_ext.ok_topk(density, axis="site"), optax.adamw(1e-3)
            ),
            "sparse_adamw": lambda: optax_ext.sparse_adamw(1e-3, density=density, axis="site"),
        }[method]()
        params = jax.tree.map(jnp.copy, self._params)
        state = optax_ext.init_state(tx, params, self._mesh)
        step = optax_ext.make_train_step(loss, tx, self._mesh, batch_spec=self._batch_spec)
        self._methods[method] = [step, params, state]
        for _ in range(warmup):
            self._take(method)
        return {"size": sum(x.size for x in jax.tree.leaves(params))}

    def _take(self, method: str) -> float:
        import jax

        step, params, state = self._methods[method]
        params, state, loss = step(params, state, self._batch)
        self._methods[method] = [step, params, state]
        return float(jax.block_until_ready(loss))

    def measure(self, method: str, steps: int) -> dict[str, Any]:
        """Seconds and bytes of a step, the mean of so many."""
        import optax_ext

        def take() -> list[float]:
            for _ in range(steps):
                self._take(method)
            # The same of each step, to the shape of a program.
            return [float(optax_ext.get_info(self._methods[method][2]).words)] * steps

        return _protocol.measured(self.barrier, take, steps)


def main() -> None:
    """Joins the other processes and does what it is told."""
    config, answer = _protocol.start()
    _gloo.join(config, devices=config["devices"])
    worker = Worker(config)
    _protocol.serve(answer, {"prepare": worker.prepare, "measure": worker.measure})


if __name__ == "__main__":
    main()
