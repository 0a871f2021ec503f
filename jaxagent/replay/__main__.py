"""`python -m jaxagent.replay`: see `command`."""

import sys

from jaxagent.replay.command import main
from jaxagent.runs import devices

if __name__ == "__main__":
    devices.use_huge_pages()
    sys.exit(main())
