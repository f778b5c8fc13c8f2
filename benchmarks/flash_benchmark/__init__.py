"""Measures jax_flash beside other attentions; `python benchmarks/run.py` is its command.

The package's `benchmark` extra brings what plots and progress bars need; tables and JSON need
nothing but JAX. The docstrings of `timing`, `cases` and `stats` say what times, work and intervals
mean.
"""
