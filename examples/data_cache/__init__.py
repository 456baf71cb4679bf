"""A cache of training data in two levels, memory and local disk, for a slow source.

It implements DataCache of Shi et al., "Towards Scalable Distributed Training of Deep Learning on
Public Cloud Clusters" (2020), Section 4.1. From the slow end to the model:

    source -> disk level -> prepare -> memory level -> share, order, augment, batch -> step
"""
