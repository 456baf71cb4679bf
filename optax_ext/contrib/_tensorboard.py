"""A writer of event files for TensorBoard."""

from typing import Any

from optax_ext._loop._monitoring import Writer


def tensorboard_writer(folder: Any) -> Writer:
    """A writer for :class:`Monitor` that makes event files for TensorBoard.

    Args:
      folder: the output folder, as a string or path.

    Raises:
      ImportError: tensorboardX is not installed.
    """
    try:
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            "tensorboard_writer needs tensorboardX: pip install 'sparse-collectives[tensorboard]'. "
            "Any function write(step, values) does instead."
        ) from error
    # Its thread writes queued events, and flushes them this often.
    events = SummaryWriter(str(folder), flush_secs=1)

    def write(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            events.add_scalar(name, value, step)

    return write
