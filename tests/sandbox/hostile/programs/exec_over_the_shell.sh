# limit_s: 1
exec sleep 100
