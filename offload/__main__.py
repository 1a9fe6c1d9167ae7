"""`python -m offload`: the same program as the console script `offload`."""

import sys

from offload.cli import main

if __name__ == "__main__":
    sys.exit(main())
