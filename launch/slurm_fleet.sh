#!/bin/bash
# A run of many processes on Slurm: one coordinator, a gang of trainers, engines that come back when they fail.
#
#   sbatch --nodes=4 launch/slurm_fleet.sh --config=configs/search_r1.py:qwen2.5-3b --config.workdir=/shared/runs/a
#   sbatch --nodes=1 --gres=gpu:8 : --nodes=6 --gres=gpu:4 launch/slurm_fleet.sh ...    # a heterogeneous job
#   bash launch/slurm_fleet.sh --print --config=... --config.workdir=DIR                # what it would start; no Slurm
#
# The first TRAINERS nodes train (of a heterogeneous job: all nodes of its first part), every other node plays; nodes
# are whole. The coordinator runs on the first node. The workdir must be a folder that all nodes see, and so must the
# folder in which this job is submitted.
#
# Settings are environment variables (sbatch hands them on):
#   TRAINERS=1           nodes that train, one process on each; also --config.fleet.trainers
#   ENGINES_PER_NODE=1   engine processes per other node
#   TRAINER_SRUN=""      more options of srun for the trainers, for example --gpus-per-task=8
#   ENGINE_SRUN=""       the same for the engines
#   PORT=8500            where the coordinator listens; JAX's own coordination uses PORT+1 and up to 100 more
#   RESTARTS=100         of each process; then the job ends
#   GRACE_S=120          for the trainer to save after SIGTERM: less than the seconds of --signal
#   PYTHON=python        the interpreter, and JOIN="$PYTHON -m jaxagent.join" what it starts
#
# Before the time limit, or at `scancel --signal=TERM --batch JOB`, the trainer saves, and the job goes back into the
# queue; the run goes on when it starts again. So it does after a preemption (--requeue). A job that is cancelled ends.
#SBATCH --job-name=jaxagent
#SBATCH --nodes=2
#SBATCH --exclusive
#SBATCH --gres=gpu:4
#SBATCH --signal=B:TERM@180
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
set -uo pipefail

fail() { echo "error: $*" >&2; exit 2; }

print='' workdir='' recipe=()
for word in "$@"; do
  case $word in
    --help|-h) while read -r line; do case $line in '#!'*) ;; '#SBATCH'*) break ;; *) line=${line#'#'}; echo "${line# }" ;; esac; done < "$0"; exit 0 ;;
    --print) print=1 ;;
    --config=*|--config.*=*) recipe+=("$word"); case $word in --config.workdir=*) workdir=${word#*=} ;; esac ;;
    *) fail "Unknown flag '$word'. Valid: --config=FILE, --config.FIELD=VALUE, --print, --help." ;;
  esac
done
[[ " ${recipe[*]-}" == *" --config="* ]] || fail "--config=FILE is missing."
[[ -n $workdir ]] || fail "--config.workdir=DIR is missing: a folder that all nodes see."

TRAINERS=${TRAINERS:-1} ENGINES_PER_NODE=${ENGINES_PER_NODE:-1} TRAINER_SRUN=${TRAINER_SRUN:-} ENGINE_SRUN=${ENGINE_SRUN:-}
PORT=${PORT:-8500} RESTARTS=${RESTARTS:-100} GRACE_S=${GRACE_S:-120} PYTHON=${PYTHON:-python}
JOIN=${JOIN:-"$PYTHON -m jaxagent.join"}
for name in TRAINERS ENGINES_PER_NODE PORT RESTARTS GRACE_S; do
  [[ ${!name} =~ ^[0-9]+$ ]] || fail "$name must be a whole number, got '${!name}'."
done

# ---------------------------------------------------------------- which node does what

trainer_part=() engine_part=()
if [[ -n ${SLURM_HET_SIZE:-} ]]; then
  [[ $SLURM_HET_SIZE == 2 ]] || fail "A heterogeneous job must have two parts, trainers and engines; this one has $SLURM_HET_SIZE."
  mapfile -t trainer_nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_0")
  mapfile -t engine_nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_1")
  trainer_part=(--het-group=0) engine_part=(--het-group=1) TRAINERS=${#trainer_nodes[@]}
else
  if [[ -n ${SLURM_JOB_NODELIST:-} ]]; then
    mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  elif [[ -n $print ]]; then
    nodes=(); for ((i = 0; i < TRAINERS + 1; i++)); do nodes+=("NODE$i"); done
  else
    fail "This is not a Slurm job: start it with sbatch, or add --print."
  fi
  ((${#nodes[@]} > TRAINERS)) || fail "${#nodes[@]} nodes for TRAINERS=$TRAINERS leave none for engines: ask sbatch for more."
  trainer_nodes=("${nodes[@]:0:TRAINERS}") engine_nodes=("${nodes[@]:TRAINERS}")
fi
first=${trainer_nodes[0]} url=http://${trainer_nodes[0]}:$PORT
recipe=(--config.fleet=on "${recipe[@]}" "--config.fleet.trainers=$TRAINERS")
join() { local IFS=,; echo "$*"; }

# ---------------------------------------------------------------- what each of them runs

vitals=/tmp/jaxagent-${SLURM_JOB_ID:-0}
ends=$workdir/fleet/ends  # exit codes of trainers, by port: srun tells the highest of those that it killed
keep="$PYTHON -m jaxagent.launch.keep"
coordinator_command() {
  printf '%s ' exec $keep --name=coordinator --restarts="$RESTARTS" --grace_s="$GRACE_S" --vitals="$vitals-coordinator" \
    -- $JOIN --role=coordinator --listen="0.0.0.0:$PORT" "${quoted[@]}"
}
trainer_command() {  # $1: the port of JAX's own coordination, another one at every start of the gang
  local gang=() mine="$vitals-trainer-\$SLURM_PROCID" said="$(printf '%q' "$ends")/$1-\$SLURM_PROCID"
  ((TRAINERS > 1)) && gang=('--rank=$SLURM_PROCID' "--processes=$TRAINERS" "--meet=$first:$1")
  printf '%s ' exec $keep --name='trainer-$SLURM_PROCID' --restarts=0 --grace_s="$GRACE_S" --vitals="$mine" --said="$said" \
    -- $JOIN --role=trainer --coordinator="$url" --name='trainer-$SLURM_PROCID' --host='$SLURMD_NODENAME' "${gang[@]}" "${quoted[@]}"
}
engine_command() {
  local name='engine-$SLURMD_NODENAME-$SLURM_PROCID' mine="$vitals-engine-\$SLURMD_NODENAME-\$SLURM_PROCID"
  printf '%s ' exec $keep --name="$name" --restarts="$RESTARTS" --grace_s=10 --vitals="$mine" \
    -- $JOIN --role=engine --coordinator="$url" --name="$name" --host='$SLURMD_NODENAME' "${quoted[@]}"
}
quoted=(); for word in "${recipe[@]}"; do quoted+=("$(printf '%q' "$word")"); done
trainer_srun=(srun "${trainer_part[@]}" --nodes="$TRAINERS" --ntasks="$TRAINERS" --ntasks-per-node=1 --cpu-bind=none
  --nodelist="$(join "${trainer_nodes[@]}")" --kill-on-bad-exit=1 $TRAINER_SRUN)
engine_srun=(srun "${engine_part[@]}" --nodes=1 --ntasks="$ENGINES_PER_NODE"
  --ntasks-per-node="$ENGINES_PER_NODE" --cpu-bind=none --kill-on-bad-exit=0 --no-kill $ENGINE_SRUN)

if [[ -n $print ]]; then
  echo "# on $first, with JAXAGENT_FLEET_TOKEN from $workdir/fleet/token"
  coordinator_command; echo
  echo "# the gang of trainers; again, on the next port, when one of them fails"
  echo "${trainer_srun[*]} bash -c '$(trainer_command $((PORT + 1)))'"
  for node in "${engine_nodes[@]}"; do
    echo "# engines; again when the node comes back"
    echo "${engine_srun[*]} --nodelist=$node bash -c '$(engine_command)'"
  done
  exit 0
fi

# ---------------------------------------------------------------- the secret of this run

mkdir -p "$ends" || fail "Cannot make '$workdir/fleet'."
if [[ ! -s $workdir/fleet/token ]]; then
  (umask 077; head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' > "$workdir/fleet/token.$$" &&
    mv "$workdir/fleet/token.$$" "$workdir/fleet/token") || fail "Cannot write '$workdir/fleet/token'."
fi
chmod 600 "$workdir/fleet/token"
JAXAGENT_FLEET_TOKEN=$(cat "$workdir/fleet/token")
export JAXAGENT_FLEET_TOKEN

# ---------------------------------------------------------------- starting, and starting again

stopping='' trainer='' pids=()
trap 'stopping=1; [[ -n $trainer ]] && kill -TERM "$trainer" 2>/dev/null' TERM INT

end() {  # signal: to the coordinator and to every loop of engines
  local pid; for pid in "${pids[@]}"; do kill "-$1" "$pid" 2>/dev/null; done
}

# Waits for a child, also where a signal to this script interrupts the wait; its exit code.
await() {
  local code
  while :; do
    wait "$1"; code=$?
    kill -0 "$1" 2>/dev/null || return $code
  done
}

engines_of() {  # node: until SIGTERM, or until they are done; a node that is lost is tried again
  local srun='' code wait_s=1 began stop=''
  trap 'stop=1; [[ -n $srun ]] && kill -TERM "$srun" 2>/dev/null' TERM
  while [[ -z $stop ]]; do
    began=$SECONDS
    "${engine_srun[@]}" --nodelist="$1" bash -c "$(engine_command)" & srun=$!
    await "$srun"; code=$?
    [[ $code == 0 || $code == 2 ]] && return $code
    ((SECONDS - began > 60)) && wait_s=1
    [[ -z $stop ]] && { echo "engines of $1: srun ended with $code, again in $wait_s s" >&2; sleep "$wait_s" & srun=$!; await "$srun"; }
    wait_s=$((wait_s < 60 ? wait_s * 2 : 60))
  done
}

bash -c "$(coordinator_command)" & coordinator=$!; pids+=("$coordinator")
for node in "${engine_nodes[@]}"; do engines_of "$node" & pids+=($!); done

code=1 wait_s=1
for ((start = 0; start <= RESTARTS; start++)); do
  began=$SECONDS port=$((PORT + 1 + start % 100))
  rm -f "$ends"/*
  "${trainer_srun[@]}" bash -c "$(trainer_command $port)" & trainer=$!
  await "$trainer"; code=$?; trainer=''
  [[ -n $stopping || $code == 0 ]] && break
  said=" $(cat "$ends/$port"-* 2>/dev/null | tr '\n' ' ')"
  for final in 2 1; do  # a mistake, and a failure that it has told: another start would come to the same
    [[ $said == *" $final "* ]] && code=$final && break 2
  done
  kill -0 "$coordinator" 2>/dev/null || { echo "the coordinator has given up" >&2; break; }
  ((SECONDS - began > 60)) && wait_s=1
  echo "trainers: ended with${said% }, srun with $code; again in $wait_s s" >&2
  sleep "$wait_s" & trainer=$!; await "$trainer"; trainer=''
  [[ -n $stopping ]] && break
  wait_s=$((wait_s < 60 ? wait_s * 2 : 60))
done

# Engines see the end of the run by themselves; whoever does not is stopped.
[[ $code == 0 ]] && for ((i = 0; i < 20; i++)); do
  living=0; for pid in "${pids[@]}"; do [[ $pid != "$coordinator" ]] && kill -0 "$pid" 2>/dev/null && living=1; done
  ((living)) || break
  sleep 1
done
end TERM
for ((i = 0; i < 20; i++)); do
  [[ -z $(jobs -rp) ]] && break
  sleep 1
done
end KILL
if [[ -n $stopping && $code != 0 ]]; then
  echo "saved; job ${SLURM_JOB_ID:-} goes back into the queue" >&2
  scontrol requeue "${SLURM_JOB_ID:-}"
fi
exit $code
