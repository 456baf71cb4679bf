"""The data of trainings: a text, or labeled images."""

from pathlib import Path

from examples import _data

from .._common.options import InputError


def read_text(path: Path | None) -> str:
    """The text to learn, by default Python's own help topics; an InputError if unusable."""
    if path is None:
        from pydoc_data import topics

        return "\n".join(topics.topics.values())
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error


def read_images(folder: Path | None) -> _data.Dataset:
    """The images to classify, by default scikit-learn's digits; an InputError if unusable."""
    try:
        return _data.idx_folder(folder) if folder else _data.digits()
    except _data.InputError as error:
        raise InputError(str(error)) from error
