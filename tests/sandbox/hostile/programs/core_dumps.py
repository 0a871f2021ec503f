# limit_s: 10
import os
import resource
import signal

from prelude import CORES, won

if resource.getrlimit(resource.RLIMIT_CORE) != (CORES, CORES):
    won(resource.getrlimit(resource.RLIMIT_CORE))
pid = os.fork()
if pid == 0:
    os.kill(os.getpid(), signal.SIGSEGV)
    os._exit(1)
if os.WCOREDUMP(os.waitpid(pid, 0)[1]):
    won("a core was dumped")
