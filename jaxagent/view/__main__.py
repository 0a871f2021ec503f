"""`python -m jaxagent.view`: see `command`."""

import sys

from jaxagent.view.command import main

if __name__ == "__main__":
    sys.exit(main())
