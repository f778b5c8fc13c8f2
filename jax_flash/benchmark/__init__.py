"""Measures jax_flash beside other attentions: `python -m jax_flash.benchmark --help`.

Needs the package's `benchmark` extra for plots and progress bars; tables and JSON need nothing
but JAX. What a figure means is said in `timing` (time), `cases` (work) and `stats` (intervals).
"""
