"""Claims that numbers in the papers themselves decide."""

# MSTopK, Table 3, samples per second with 2DTAR and with MSTopK; "in all other cases" leaves out
# ResNet-50 at 224 x 224.
_THROUGHPUT = {
    "ResNet-50 (96*96)": (313_600, 396_800),
    "VGG-19": (47_616, 57_600),
    "Transformer": (2_534, 3_502),
}
# SparCML, Table 1: rows and features. A batch has 1,000 rows of each node (section 8.2).
_SETS = {"URL": (2_396_130, 3_231_961), "Webspam": (350_000, 16_609_143)}
_ROWS = 1_000
# SparCML, Table 2, logistic regression: seconds of an epoch and of its exchange, dense and sparse.
_ETHERNET = {"URL": (1045.0, 1004.6, 80.26, 42.2), "Webspam": (768.0, 759.5, 37.9, 29.5)}
_SUPERCOMPUTER = (26.4, 25.8, 7.5, 7.0)
# Bytes per second of a node: Gigabit Ethernet, and Aries (section 5.2).
_GIGABIT, _ARIES = 1.25e8, 1e10


def _dense_seconds(data: str, nodes: int, rate: float) -> float:
    """The exchange of an epoch by a dense allreduce of float32 at the rate of the link."""
    rows, features = _SETS[data]
    return rows / (_ROWS * nodes) * 4 * 2 * features * (nodes - 1) / nodes / rate


def _throughput() -> dict[str, float]:
    """The least and the largest gain of MSTopK."""
    gains = [sparse / dense for dense, sparse in _THROUGHPUT.values()]
    return {"least gain": min(gains), "largest gain": max(gains)}


def _exchange_over_ethernet() -> dict[str, float]:
    """The sparse exchange of Table 2 compared with a dense allreduce that uses its link."""
    found = {}
    for data, (_, dense, _, sparse) in _ETHERNET.items():
        ideal = _dense_seconds(data, 8, _GIGABIT)
        found[f"{data}, dense / sparse"] = ideal / sparse
        found[f"{data}, share of the link that Table 2's dense exchange used"] = ideal / dense
    return found


def _epoch_on_a_supercomputer() -> dict[str, float]:
    dense, exchange, sparse, _ = _SUPERCOMPUTER
    return {"dense / sparse": (dense - exchange + _dense_seconds("URL", 32, _ARIES)) / sparse}


def _above_spark() -> dict[str, float]:
    """Section 8.2, seconds of an epoch on URL: Spark, a dense exchange by Cray MPI, SparCML."""
    spark, dense, sparse = 378, 13, 6
    return {"dense Cray MPI / SparCML": dense / sparse, "Spark / dense Cray MPI": spark / dense}
