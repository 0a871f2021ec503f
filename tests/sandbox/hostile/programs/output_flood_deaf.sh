# limit_s: 8
trap '' INT TERM PIPE HUP; while :; do printf '%01000d' 0; done
