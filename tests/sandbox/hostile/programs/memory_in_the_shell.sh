# limit_s: 5
x=aaaaaaaaaaaaaaaa; while :; do x=$x$x; done
