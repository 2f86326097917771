"""`python -m tests.bench.scale`: see `command`."""

import sys

from tests.bench.scale.command import main

if __name__ == "__main__":
    sys.exit(main())
