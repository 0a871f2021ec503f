# limit_s: 5
eval() { :; }; printf() { builtin printf 0; }; exit() { :; }; PROMPT_COMMAND='echo x'; PS1='$(sleep 1)'; trap 'echo trapped' DEBUG EXIT ERR; alias eval=true printf=true; set -o noglob -o nounset; IFS=x
