# limit_s: 10
cat /proc/1/environ 2>/dev/null | grep -a "$SECRET" && won; tr '\0' ' ' </proc/1/cmdline | grep "$SECRET" && won; true
