"""jaxagent: reinforcement learning of language-model agents in JAX. Each command says more with --help.

python -m jaxagent.main --config=search_r1            train; the same command again goes on
python -m jaxagent.main --config=NAME --dry_run       what a run needs: memory, time, no weights allocated
python -m jaxagent.evaluate --config.workdir=RUN      pass@k of a checkpoint
python -m jaxagent.replay --config.workdir=RUN        make recorded steps again, and compare them
python -m jaxagent.serve --model=RUN/policy           serve a policy over HTTP
python -m jaxagent.view runs                          curves, every episode, two runs side by side, on a page
python -m jaxagent.observe.report RUN                 write RUN/report.html anew, also while the run trains
python -m jaxagent.launch.sweep ...                   many runs, one after the other
python -m jaxagent.sandbox                            which sandboxes work on this machine
python -m jaxagent.join --role=ROLE ...               one process of a run of many
"""

from __future__ import annotations

import os
import sys

from jaxagent.config import flags


def main() -> int:
    """Prints the commands."""
    try:
        print(f"{__doc__}\nConfigs that come along:", ", ".join(file.stem for file in flags.preset_files()), flush=True)
    except BrokenPipeError:  # whoever reads has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
