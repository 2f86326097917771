"""The entry point of python -m pronk."""

from pronk.command import main

if __name__ == "__main__":
    main()
