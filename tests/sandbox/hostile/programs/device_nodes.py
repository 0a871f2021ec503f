# limit_s: 10
import os

from prelude import won

for d in (8, 254, 1):
    for kind in (25014, 8630):
        try:
            os.mknod("/tmp/dev%d%o" % (d, kind), kind, os.makedev(d, 1))
            won(d)
        except OSError as e:
            print(e)
for p in (
    "/dev/sda",
    "/dev/vda",
    "/dev/mem",
    "/dev/kmsg",
    "/dev/kvm",
    "/dev/fuse",
    "/dev/net/tun",
    "/proc/kcore",
    "/proc/kmsg",
):
    try:
        open(p, "rb").read(1)
        won(p)
    except OSError:
        pass
