"""What is known of MiniWoB++'s pages: which are left out and why, and how some of them are solved."""

from __future__ import annotations

import re

from jaxagent.envs.browser.tree import find

_REASONS = {
    "what it asks for is only to be seen": "bisect-angle circle-center click-color click-menu-2 click-shades "
    "click-shape count-shape count-sides find-midpoint hot-cold identify-shape number-checkboxes right-angle "
    "simon-says tic-tac-toe visual-addition use-colorwheel use-colorwheel-2",
    "it wants the mouse to be dragged or to follow": "chase-circle daily-calendar drag-box drag-circle drag-cube "
    "drag-items drag-items-grid drag-shapes drag-shapes-2 drag-single-shape drag-sort-numbers draw-circle draw-line "
    "hover-shape moving-items resize-textarea",
    "it wants text to be marked": "highlight-text highlight-text-2 text-editor",
}
LEFT_OUT = {name: reason for reason, names in _REASONS.items() for name in names.split()}

# What the goal says, and the steps: kind, role, name, text. Groups of the goal are {0}, {1}; "textbox#1" is the second.
SOLUTIONS = {
    "click-test": ("", "click|button|Click Me!"),
    "click-test-2": ("", "click|button|ONE"),
    "click-button": (r'"(.+)" button', "click|button|{0}"),
    "click-button-sequence": ("", "click|button|ONE", "click|button|TWO"),
    "click-link": (r'link "(.+)"', "click|text|{0}"),
    "click-tab": (r"Click on (.+)\.", "click|tab|{0}"),
    "click-option": (r"Select (.+) and", "click|radio|{0}", "click|button|Submit"),
    "click-dialog": ("", "click|button|Close"),
    "click-collapsible": ("", "click|tab|", "click|tab|Submit"),
    "choose-list": (r"Select (.+) from", "select|combobox||{0}", "click|button|Submit"),
    "enter-text": (r'Enter "(.+)" into', "type|textbox||{0}", "click|button|Submit"),
    "enter-text-dynamic": (r'Enter "(.+)" into', "type|textbox||{0}", "click|button|Submit"),
    "enter-password": (r'"(.+)"', "type|password||{0}", "type|password#1||{0}", "click|button|Submit"),
    "login-user": (r'"(.+)" and .* "(.+)"', "type|textbox||{0}", "type|password||{1}", "click|button|Login"),
    "focus-text": ("", "click|textbox|"),
    "grid-coordinate": (r"(\(.+\))", "click|box|{0}"),
}


def step_of(name: str, number: int, goal: str, shown: str) -> str | None:
    """The action of a step, from 0, that solves a page; None = nobody knows."""
    said, *steps = SOLUTIONS.get(name, ("",))
    match = re.search(said, goal)
    if number >= len(steps) or match is None:
        return None
    kind, role, label, *text = (part.format(*match.groups()) for part in steps[number].split("|"))
    role, _, nth = role.partition("#")
    return " ".join([kind, str(find(shown, role, label, int(nth or 0))), *text])
