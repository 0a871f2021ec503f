# limit_s: 10
for f in /etc/shadow /root/.bash_history /root/.ssh/id_rsa /home/*/.ssh /proc/1/root/$BAIT /proc/self/root/../$BAIT; do cat $f 2>/dev/null && won; done; ls -d /work /var/lib/dpkg 2>/dev/null && won; true
