"""Entry point of `python -m sparse_rl`, which runs the `sparse-rl` command."""

from .cli import main

if __name__ == "__main__":
    main()
