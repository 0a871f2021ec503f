# limit_s: 20
for i in $(seq 3000); do mkdir d 2>/dev/null && cd d || break; done; cd ~
