# limit_s: 1
trap '' INT TERM HUP QUIT; while :; do :; done
