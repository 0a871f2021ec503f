# limit_s: 10
for d in ~ /tmp /var/tmp /dev/shm /run; do head -c 25M /dev/zero > $d/big 2>/dev/null; done; [ $(cat ~/big /tmp/big /var/tmp/big /dev/shm/big /run/big 2>/dev/null | wc -c) -gt 70000000 ] && won
