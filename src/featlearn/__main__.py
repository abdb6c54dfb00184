"""`python -m featlearn` is the command `featlearn`."""

import sys

from featlearn.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
