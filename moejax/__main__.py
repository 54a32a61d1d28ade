"""The commands of `moejax` as `python -m moejax COMMAND ...`."""

from moejax.cli import main

if __name__ == "__main__":
    main()
