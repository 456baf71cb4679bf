"""One host's JAX process: epochs of a linear model over Gloo, one training for each exchange."""

from typing import Any

from . import _gloo, _protocol


class Worker:
    """The trainings of one data set; each goes on from turn to turn."""

    def __init__(self, config: dict[str, Any]):
        from examples.linear_models import coordinate_descent, data, sgd, workers

        given = config["data"], data.SHAPES[config["data"]], config["seed"], config["rows"]
        source = data.spread(data.power_law(*given))
        self._config = config
        self._method: Any = {"sgd": sgd, "scd": coordinate_descent}[config["method"]]
        self._group = workers.on_devices()
        self.barrier = _gloo.barrier(self._group.mesh)
        self._problem: Any = self._method.make(source, self._group, config["batch"])
        self._trainings: dict[tuple[str, str], Any] = {}
        self.barrier()

    def prepare(self, model: str, exchange: str) -> dict[str, Any]:
        """Compiles a training; says how many steps an epoch has."""
        from examples.linear_models import training

        given = {name: self._config[name] for name in ("regularisation", "seed")}
        sgd = self._config["method"] == "sgd"
        given |= {"rate": None} if sgd else {"block": self._config["block"]}
        trained = self._group, training.MODELS[model], self._problem, exchange
        made = self._method.Trainer(*trained, **given)
        self._trainings[model, exchange] = made
        return {"steps": made.run.steps}

    def drop(self, model: str) -> dict[str, Any]:
        """Frees the trainings of a model."""
        for key in [key for key in self._trainings if key[0] == model]:
            del self._trainings[key]
        return {}

    def measure(self, model: str, exchange: str, most: int) -> dict[str, Any]:
        """Seconds, bytes and words of a step, the mean of those of an epoch, or ``most``."""
        training = self._trainings[model, exchange]
        taken = min(most, training.run.steps)

        def take() -> list[float]:
            training.epoch(most=most)
            return [training.run.words[-1]]

        found = _protocol.measured(self.barrier, take, taken)
        # Without the evaluation of the objective, which is no part of a step.
        found["seconds"] = training.run.seconds[-1] / taken
        found["exchange_seconds"] = training.run.exchange_seconds[-1] / taken
        found["delivered"] = training.run.delivered[-1]
        found["objective"] = training.run.objectives[-1]
        return found


def main() -> None:
    """Joins the other processes and does what it is told."""
    config, answer = _protocol.start()
    _gloo.join(config)
    worker = Worker(config)
    _protocol.serve(
        answer, {"prepare": worker.prepare, "measure": worker.measure, "drop": worker.drop}
    )


if __name__ == "__main__":
    main()
