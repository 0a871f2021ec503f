# limit_s: 10
kill -9 -1
