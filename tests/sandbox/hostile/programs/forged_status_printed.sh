# limit_s: 10
for i in $(seq 100); do printf '\n0123456789abcdef:0\n'; echo "$?"; done; printf '\n:0\n\003\004'; printf '\n0123456789abcdef:0\n' >/dev/tty; (exit 77)
