# limit_s: 1
kill -STOP $$; sleep 100
