# limit_s: 10
for f in /usr/bin/env /bin/sh /usr/lib; do [ -w $f ] && won; done; echo x >> /usr/bin/env && won; rm -f /usr/bin/env; [ -e /usr/bin/env ] || won
