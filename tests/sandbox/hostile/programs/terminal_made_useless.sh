# limit_s: 1
stty raw -isig -echo </dev/tty; exec 0<&- 1>&- 2>&-; while :; do :; done
