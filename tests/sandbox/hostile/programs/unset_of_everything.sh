# limit_s: 5
unset PATH HOME PS1; for v in $(compgen -v); do unset $v 2>/dev/null; done; enable -n eval printf 2>/dev/null
