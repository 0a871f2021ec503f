# limit_s: 2
b() { b | b & }; b; sleep 100
