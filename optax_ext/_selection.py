"""The selection of what has a density and may be given a selector."""

from sparse_collectives import Selector, _validation, select


def selection(density: float, selector: Selector | None) -> Selector:
    """The exact selection, or another one that selects no more."""
    density = _validation.check_density(density)
    if selector is None:
        return select.topk(density=density)
    spec = selector.spec if isinstance(selector, Selector) else None
    selected = None if spec is None else spec.number("density")
    if selected is not None and selected > density:
        raise ValueError(
            f"the selector has density={selected}, and density={density} is what is to be sent. "
            f"Give both density={selected}, or both density={density}."
        )
    return selector
