# limit_s: 10
import os

from prelude import SYSCTLS_READ_ONLY, won

for path in ("/usr", "/proc/sys") if SYSCTLS_READ_ONLY else ("/usr",):
    if not os.statvfs(path).f_flag & os.ST_RDONLY:
        won(path)
