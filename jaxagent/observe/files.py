"""What a workdir holds, by name."""

METRICS_FILE = "metrics.jsonl"  # one record per step; see metrics.py
EPISODES_FOLDER = "episodes"  # every episode, whole; see episode_store.py
EPISODES_FILE = "episodes.jsonl"  # some evaluation episodes, as earlier versions kept them
EVALUATIONS_FOLDER = "evaluations"  # a folder per evaluation by jaxagent.evaluate; see evaluation/run.py
CONSOLE_FILE = "console.txt"  # the lines that the console shows, of all starts; see progress.py
SUMMARY_FILE = "summary.json"  # the run in one dict, written when it ends
LOCK_FILE = ".lock"  # held by the process that trains here
CONFIG_FILE = "config.json"  # the parsed config, written when training begins
RUN_FILE = "run.json"  # code, command, machine and time of every start; see provenance.py
REPORT_FILE = "report.html"  # made from the four above; see report.py
TENSORBOARD_FOLDER = "tensorboard"
TRACKING_FOLDER = "tracking"  # what other trackers of the run were told; see track.py
PLAN_FILE = "plan.json"  # what --dry_run printed
RECORD_FOLDER = "record"  # what RL steps were made of; see runs/record.py
CHECKPOINTS_FOLDER = "checkpoints"  # a bundle per folder; see learner/checkpoint.py
POLICY_FOLDER = "policy"  # the exported model
OUTDATED_FILE = "OUTDATED"  # in the policy's folder: the run has gone on since it was exported
