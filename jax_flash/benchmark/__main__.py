"""`python -m jax_flash.benchmark`: see --help of each command."""

import sys

from jax_flash.benchmark import cli

if __name__ == "__main__":
    sys.exit(cli.main(sys.argv[1:]))
