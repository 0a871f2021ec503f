"""A mistake of the user's, and the nearest valid name. On the lowest floor: every room raises these."""

from __future__ import annotations

import difflib
import os
import signal
import traceback
import typing


class ConfigError(ValueError):
    """A user's mistake, told in one line. `main` prints it and exits with code 2."""


class WaitedInVainError(RuntimeError):
    """What was waited for did not come in its time: one line that says who waited for what, and for how long.

    It is nobody's mistake that could be mended in a config: whoever started the process starts it again. Commands end
    with exit code `WAITED`.
    """


WAITED = 75  # as in sysexits.h: a failure for now


def nearest(name: str, valid: typing.Iterable[str]) -> str:
    """ " Did you mean 'x'?" for the closest valid name, or a list of all of them."""
    valid = list(valid) or ["none"]
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"Did you mean '{close[0]}'?" if close else f"Valid: {', '.join(valid)}."


# What TRL, verl and other trainers call a field of ours.
SYNONYMS = {
    "lr": "rl.optimizer.learning_rate",
    "learning_rate": "rl.optimizer.learning_rate",
    "max_grad_norm": "rl.optimizer.grad_clip",
    "warmup_steps": "rl.optimizer.warmup_steps",
    "beta": "rl.kl.coefficient",
    "kl_coef": "rl.kl.coefficient",
    "kl_loss_coef": "rl.kl.coefficient",
    "entropy_coeff": "rl.entropy_coefficient",
    "epsilon": "rl.objective.clip_low",
    "clip_ratio": "rl.objective.clip_low",
    "epsilon_high": "rl.objective.clip_high",
    "clip_ratio_high": "rl.objective.clip_high",
    "num_generations": "rl.group_size",
    "rollout_n": "rl.group_size",
    "n": "rl.group_size",
    "batch_size": "rl.tasks_per_step",
    "train_batch_size": "rl.tasks_per_step",
    "num_iterations": "rl.epochs",
    "ppo_epochs": "rl.epochs",
    "max_steps": "rl.steps",
    "total_training_steps": "rl.steps",
    "temperature": "rl.sampling.temperature",
    "max_completion_length": "env.turn_tokens",
    "max_response_length": "env.turn_tokens",
    "max_prompt_length": "env.context_tokens",
    "output_dir": "workdir",
    "save_steps": "checkpoint.every",
    "eval_steps": "eval.every",
}


def unknown_field(path: str, name: str, valid: typing.Iterable[str]) -> ConfigError:
    """What to say of a field that the section at `path` does not have: what we call it, or the nearest name."""
    valid = list(valid)
    ours = SYNONYMS.get(name)
    here = difflib.get_close_matches(name, valid, n=1, cutoff=0.8)
    advice = nearest(name, valid) if here or not ours else f"It is called 'config.{ours}' here."
    return ConfigError(f"Unknown config field '{path}.{name}'. {advice}")


def failure_line(error: BaseException) -> str:
    """One line of what code of the user's raised, with the last line of it that was on the way there."""
    ours = (os.path.dirname(os.path.dirname(__file__)), os.path.dirname(os.__file__) + os.sep, "<")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    place = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}  # as the shell has them
NAMES = {signal.SIGINT: "interrupted", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}


def ending_signals() -> list[signal.Signals]:
    """Those of `EXIT_CODES` that our parent (nohup, a shell's background job) has not had us ignore."""
    return [signum for signum in EXIT_CODES if signal.getsignal(signum) is not signal.SIG_IGN]


class Stopped(SystemExit):
    """Ends a run with the signal's exit code. `str` is the line that `main` prints."""

    def __init__(self, signum: signal.Signals, text: str):
        super().__init__(EXIT_CODES[signum])
        self.exit_code = EXIT_CODES[signum]
        self._text = f"{NAMES[signum]}{text}"

    def __str__(self) -> str:
        return self._text
