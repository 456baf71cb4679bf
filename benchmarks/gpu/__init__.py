"""The library on GPUs: programs compiled for one, and timings on one."""
