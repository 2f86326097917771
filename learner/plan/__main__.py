"""The entry point of python -m learner.plan."""

import sys

from learner.plan.plan_command import main

if __name__ == "__main__":
    sys.exit(main())
