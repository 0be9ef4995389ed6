"""`python -m mimo`: the same as the command `mimo`."""

import sys

from mimo.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
