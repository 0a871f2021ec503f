# limit_s: 10
rm -rf /dev/fd 2>/dev/null; mkdir /dev/fd 2>/dev/null && won fd
mv /dev/stdin /dev/other 2>/dev/null && won stdin
ln -sf /tmp/mine /dev/stdout 2>/dev/null && won stdout
echo x 2>/dev/null >/dev/mine && won file
mv /dev/shm /dev/shm2 2>/dev/null && won shm
chmod 777 /dev 2>/dev/null && won mode
umount /dev 2>/dev/null && won umount
echo a >/dev/shm/file && cat /dev/shm/file </dev/null >/dev/null || won "shared memory is of no use"
