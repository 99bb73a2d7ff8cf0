"""`python -m sparse_rl` is the command `sparse-rl`."""

from .cli import main

if __name__ == "__main__":
    main()
