"""A mistake of the user's, and the nearest valid name. On the lowest floor: every room raises these."""

from __future__ import annotations

import difflib
import os
import signal
import textwrap
import traceback
import typing


class ConfigError(ValueError):
    """A user's mistake, told in one line. `main` prints it and exits with code 2."""


class WaitedInVainError(RuntimeError):
    """What was waited for did not come in its time: one line that says who waited for what, and for how long.

    It is nobody's mistake that could be mended in a config: whoever started the process starts it again. Commands end
    with exit code `WAITED`.
    """


class AttemptLost(WaitedInVainError):
    """What an attempt was played in is gone, and nobody failed: it has no result, and is played again by its number."""


WAITED = 75  # as in sysexits.h: a failure for now


def nearest(name: str, valid: typing.Iterable[str]) -> str:
    """ " Did you mean 'x'?" for the closest valid name, or a list of all of them."""
    valid = list(valid) or ["none"]
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"Did you mean '{close[0]}'?" if close else f"Valid: {', '.join(valid)}."


# Our field: what TRL, verl and other trainers call it.
_ELSEWHERE = {
    "rl.optimizer.learning_rate": "lr learning_rate actor_lr",
    "rl.optimizer.grad_clip": "max_grad_norm gradient_clipping",
    "rl.kl.coefficient": "beta kl_coef kl_loss_coef",
    "rl.objective.clip_low": "epsilon clip_ratio clip_range",
    "rl.objective.clip_high": "epsilon_high clip_ratio_high",
    "rl.group_size": "num_generations rollout_n n",
    "rl.tasks_per_step": "batch_size train_batch_size per_device_train_batch_size",
    "rl.epochs": "num_iterations ppo_epochs",
    "rl.steps": "max_steps total_training_steps",
    "rl.sampling.temperature": "temperature",
    "env.turn_tokens": "max_completion_length max_response_length max_new_tokens",
    "env.context_tokens": "max_prompt_length max_model_len",
    "workdir": "output_dir",
}
# Fields of earlier versions: the value that changed nothing, and what holds for all runs now.
REMOVED = {
    "env.user_strategy": ("llm", "the customer says what it says"),
    "fleet.lend": (False, "the trainer's own engine plays evaluations alone"),
    "fleet.in_flight": ("fixed", "an engine plays env.concurrent_episodes at once"),
    "fleet.transfer": ("files", "engines take weights from files"),
}
_OF_CHOICE = {"env.user_strategy": "tau_bench"}  # of these the one choice that had them: others may have such a field
_OURS = {name: ours for ours, names in _ELSEWHERE.items() for name in names.split()}


def removed_fields(config: typing.Mapping[str, typing.Any]) -> list[str]:
    """Those of `REMOVED` that a stored config has."""
    sections = {field: config.get(field.partition(".")[0]) for field in REMOVED}
    return [
        field
        for field, section in sections.items()
        if isinstance(section, typing.Mapping)
        and field.partition(".")[2] in section
        and _OF_CHOICE.get(field, section.get("name")) == section.get("name")
    ]


def unknown_field(path: str, name: str, valid: typing.Iterable[str]) -> ConfigError:
    """What to say of a field that the section at `path` does not have: what we call it, or the nearest name."""
    if now := REMOVED.get(f"{path}.{name}".removeprefix("config.")):
        return ConfigError(f"Config field '{path}.{name}' exists no more: {now[1]}. Leave it out.")
    valid = list(valid)
    ours = "" if difflib.get_close_matches(name, valid, n=1, cutoff=0.8) else _OURS.get(name, "")
    own = ours.rpartition(".")[2]  # of another stage's section, perhaps
    advice = nearest(name, valid) if not ours else f"It is called 'config.{ours}' here."
    advice = f"Did you mean '{own}'?" if own in valid else advice
    return ConfigError(f"Unknown config field '{path}.{name}'. {advice}")


def failure_line(error: BaseException) -> str:
    """One line of what code of the user's raised, with the last line of it that was on the way there."""
    ours = (os.path.dirname(os.path.dirname(__file__)), os.path.dirname(os.__file__) + os.sep, "<")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    frames = [f for f in frames if f"{os.sep}site-packages{os.sep}" not in f.filename] or frames
    place = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 400, placeholder=' ...')}{place}"


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
