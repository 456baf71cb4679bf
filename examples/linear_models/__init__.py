"""Linear models on sparse data, trained by several workers that exchange sparse gradients.

MPI-OPT of SparCML (sections 7 and 8.2): nothing is selected and nothing is dropped. Where rows have
few of many features, so has the gradient of a batch, and the workers send it as it is.

    python -m examples.linear_models --help
"""
