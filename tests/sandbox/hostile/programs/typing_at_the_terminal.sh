# limit_s: 5
printf '\003\003exit\n' > /dev/tty; python3 -c "import fcntl,termios; [fcntl.ioctl(open('/dev/tty','w'), termios.TIOCSTI, c.encode()) for c in 'exit 0\n']" 2>&1 | tail -1; (exit 77)
