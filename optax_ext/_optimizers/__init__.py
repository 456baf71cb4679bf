"""Complete optimizers: gradients of each worker in, updates of the parameters out."""
