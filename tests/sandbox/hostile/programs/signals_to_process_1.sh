# limit_s: 10
for n in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 18 19 20 21 22 24 25 31 34 50 64; do kill -$n 1 2>/dev/null; done
sleep 0.2
