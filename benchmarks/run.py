"""Measures jax_flash beside other attentions: `python benchmarks/run.py --help`."""

import pathlib
import sys

# Python puts a script's folder on the path by itself, but not where PYTHONSAFEPATH is set. The
# repository's root must stay off it: the folder jax_flash/ there would hide the installed package.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from flash_benchmark import cli

if __name__ == "__main__":
    sys.exit(cli.main(sys.argv[1:]))
