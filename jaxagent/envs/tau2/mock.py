"""tau2-bench's mock domain: users with tasks; the user has notifications of their own. Small enough to read whole."""

from __future__ import annotations

from typing import Annotated

from jaxagent.envs.tau2.retail import transfer_to_human_agents
from jaxagent.envs.tau2.tables import Record, Tables
from jaxagent.envs.tau2.toolkit import Toolkit, ToolRefusal

TASK = {"task_id": str, "title": str, "description?": str, "status": str}
NOTIFICATION = {"notification_id": str, "message": str, "status": str, "task_id?": str}

TaskId = Annotated[str, "The task's id, such as 'task_1'."]
NotificationId = Annotated[str, "The notification's id, such as 'notif_1'."]


def create_task(
    data: Tables,
    user_id: Annotated[str, "Who the task is for."],
    title: Annotated[str, "The task's title."],
    description: Annotated[str | None, "What the task is about; may be left out."] = None,
) -> Record:
    """Makes a new task for a user."""
    _record(data, "users", user_id)
    task_id = f"task_{len(data['tasks']) + 1}"
    task = {"task_id": task_id, "title": title, "description": description, "status": "pending"}
    data["tasks"].add(task_id, task)
    data["users"].change(user_id)["tasks"].append(task_id)
    return task


def get_users(data: Tables) -> list[Record]:
    """Lists all users."""
    return list(data["users"].values())


def update_task_status(
    data: Tables, task_id: TaskId, status: Annotated[str, "Either 'pending' or 'completed'."]
) -> Record:
    """Gives a task another status."""
    # As published, the tool takes any word for a status; the policy text says which there are.
    task = _record(data, "tasks", task_id, change=True)
    task["status"] = status
    return task


def assert_number_of_tasks(data: Tables, user_id: str, expected_number: int) -> bool:
    """Whether a user has so many tasks."""
    return len(_record(data, "users", user_id)["tasks"]) == expected_number


def assert_task_status(data: Tables, task_id: str, expected_status: str) -> bool:
    """Whether a task has this status."""
    return _record(data, "tasks", task_id)["status"] == expected_status


def check_notifications(data: Tables) -> list[Record]:
    """Shows all of your notifications."""
    return list(data["notifications"].values())


def dismiss_notification(data: Tables, notification_id: NotificationId) -> str:
    """Marks one of your notifications as read."""
    _record(data, "notifications", notification_id, change=True)["status"] = "read"
    return f"Notification {notification_id} dismissed"


def add_notification(data: Tables, notification_id: str, message: str, task_id: str | None = None) -> Record:
    """A new notification that is unread."""
    record: Record = {"notification_id": notification_id, "message": message, "status": "unread", "task_id": task_id}
    data["notifications"].add(notification_id, record)
    return record


def assert_notification_status(data: Tables, notification_id: str, expected_status: str) -> bool:
    """Whether a notification has this status."""
    return _record(data, "notifications", notification_id)["status"] == expected_status


def _record(data: Tables, table: str, key: str, change: bool = False) -> Record:
    if key not in data[table]:
        raise ToolRefusal(f"{table[:-1].capitalize()} {key} not found")
    return data[table].change(key) if change else data[table][key]


AGENT = Toolkit(
    forms={"tasks": TASK, "users": {"user_id": str, "name": str, "tasks": [str]}},
    tools=(create_task, get_users, update_task_status, transfer_to_human_agents),
    helpers=(assert_number_of_tasks, assert_task_status),
)
USER = Toolkit(
    forms={"notifications": NOTIFICATION},
    tools=(check_notifications, dismiss_notification),
    helpers=(add_notification, assert_notification_status),
)
