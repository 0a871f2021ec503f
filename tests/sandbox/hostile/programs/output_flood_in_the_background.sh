# limit_s: 10
(trap '' INT HUP; while :; do echo noise; done) & sleep 0.2
