# limit_s: 10
head -c 300M /dev/zero > big && won; rm -f big
