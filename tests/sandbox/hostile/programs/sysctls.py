# limit_s: 10
import os

from prelude import won

KERNEL = ("core_pattern", "hostname", "sysrq", "modprobe", "hotplug", "pid_max")
OTHER = ("net/ipv4/ip_forward", "user/max_user_namespaces", "vm/overcommit_memory", "vm/drop_caches")


def write(path, text):
    try:
        fd = os.open(path, os.O_WRONLY)
        os.write(fd, text)  # the kernel may say no only here
        won(path)
    except OSError as e:
        print(e)


for name in (*(f"kernel/{k}" for k in KERNEL), *OTHER):
    write(f"/proc/sys/{name}", b"1")
for path in ("/proc/sysrq-trigger", "/sys/kernel/uevent_helper", "/proc/irq/default_smp_affinity"):
    write(path, b"1")
write("/proc/self/oom_score_adj", b"-1000")
