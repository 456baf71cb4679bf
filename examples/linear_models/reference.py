"""scikit-learn's solvers of the same objectives, to hold a training against."""

import numpy as np
from scipy.sparse import csr_matrix
from sklearn.linear_model import LogisticRegression
from sklearn.svm import LinearSVC


def solved(
    matrix: csr_matrix, labels: np.ndarray, model: str, regularisation: float
) -> tuple[np.ndarray, float]:
    """The weights ``f64[n]`` that a solver finds, and their objective.

    Args:
      matrix: ``[N, n]``.
      labels: ``[N]``, -1 or 1.
      model: a key of :data:`.models.MODELS`.
      regularisation: above 0.
    """
    matrix = matrix.astype(np.float64)
    # scikit-learn minimises |w|^2 / 2 + C * sum(loss).
    scale = 1 / (regularisation * len(labels))
    if model == "logistic":
        solver = LogisticRegression(C=scale, fit_intercept=False, tol=1e-7, max_iter=10_000)
    else:
        loss = {"svm": "squared_hinge", "hinge": "hinge"}[model]
        solver = LinearSVC(
            C=scale,
            loss=loss,
            dual=model == "hinge",
            fit_intercept=False,
            tol=1e-6,
            max_iter=1_000_000,
            random_state=0,
        )
    weights = solver.fit(matrix, labels).coef_[0]
    return weights, objective(matrix, labels, weights, model, regularisation)


def objective(
    matrix: csr_matrix,
    labels: np.ndarray,
    weights: np.ndarray,
    model: str,
    regularisation: float,
) -> float:
    """``mean(loss) + regularisation / 2 * |w|^2`` in float64."""
    weights = weights.astype(np.float64)
    products = labels * (matrix @ weights)
    losses = {
        "logistic": lambda: np.logaddexp(0, -products),
        "svm": lambda: np.maximum(0, 1 - products) ** 2,
        "hinge": lambda: np.maximum(0, 1 - products),
    }[model]()
    return float(losses.mean() + regularisation / 2 * weights @ weights)


def accuracy(matrix: csr_matrix, labels: np.ndarray, weights: np.ndarray) -> float:
    """The share of rows on the right side of 0."""
    return float(np.mean((matrix @ weights > 0) == (labels > 0)))
