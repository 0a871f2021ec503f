# limit_s: 10
head -c 100000 /dev/urandom; printf '\0\1\2\3\4\33c\33]0;x\7\377\376'
