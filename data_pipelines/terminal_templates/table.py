"""All templates, by name, with their level and whether they are kept out of training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from jaxagent.data_pipelines.terminal_templates import (
    archives,
    config_files,
    home,
    system,
    tables,
    text,
    trees,
    version_control,
)
from jaxagent.data_pipelines.terminal_templates.draft import Draft, Draw


@dataclasses.dataclass(frozen=True)
class Template:
    """A family of tasks. Level 1: one short command. 2: one or two, with some care. 3: several things to get right."""

    level: int
    make: Callable[[Draw], Draft]


TEMPLATES: Mapping[str, Template] = {
    **{name: Template(1, home.single(operation)) for name, operation in home.OPERATIONS.items()},
    "count_lines": Template(1, text.count_lines),
    "matching_lines": Template(1, text.matching_lines),
    "upper_case": Template(1, text.upper_case),
    "reverse_lines": Template(1, text.reverse_lines),
    "line_range": Template(1, text.line_range),
    "unique_sorted": Template(1, text.unique_sorted),
    "compress_file": Template(1, archives.compress_file),
    "decompress_file": Template(1, archives.decompress_file),
    "replace_word": Template(2, text.replace_word),
    "first_occurrences": Template(2, text.first_occurrences),
    "longest_line": Template(2, text.longest_line),
    "count_in_each": Template(2, text.count_in_each),
    "csv_column": Template(2, tables.csv_column),
    "csv_filter": Template(2, tables.csv_filter),
    "csv_sum": Template(2, tables.csv_sum),
    "largest_rows": Template(2, tables.largest_rows),
    "missing_lines": Template(2, tables.missing_lines),
    "archive_folder": Template(2, archives.archive_folder),
    "extract_archive": Template(2, archives.extract_archive),
    "extract_one": Template(2, archives.extract_one),
    "write_checksums": Template(2, archives.write_checksums),
    "rename_suffix": Template(2, trees.rename_suffix),
    "list_by_suffix": Template(2, trees.list_by_suffix),
    "delete_empty": Template(2, trees.delete_empty),
    "scripts_executable": Template(2, trees.scripts_executable),
    "repoint_link": Template(2, trees.repoint_link),
    "containing_word": Template(2, trees.containing_word),
    "move_by_word": Template(2, trees.move_by_word),
    "first_commit": Template(2, version_control.first_commit),
    "commit_change": Template(2, version_control.commit_change),
    "branch_and_tag": Template(2, version_control.branch_and_tag),
    "ignore_files": Template(2, version_control.ignore_files),
    "set_ini_key": Template(2, config_files.set_ini_key),
    "set_json_key": Template(2, config_files.set_json_key),
    "set_variable": Template(2, config_files.set_variable),
    "change_host": Template(2, config_files.change_host),
    "users_with_shell": Template(2, config_files.users_with_shell),
    "add_cron_job": Template(2, config_files.add_cron_job),
    "stop_process": Template(2, system.stop_process),
    "errors_of_service": Template(2, system.errors_of_service),
    "status_counts": Template(2, system.status_counts),
    "time_window": Template(2, system.time_window),
    "word_frequency": Template(3, text.word_frequency),
    "mail_addresses": Template(3, text.mail_addresses),
    "join_tables": Template(3, tables.join_tables),
    "csv_to_json": Template(3, tables.csv_to_json),
    "totals_by_city": Template(3, tables.totals_by_city),
    "json_lines_filter": Template(3, tables.json_lines_filter),
    "average_by_item": Template(3, tables.average_by_item),
    "find_corrupted": Template(3, archives.find_corrupted),
    "rotate_logs": Template(3, archives.rotate_logs),
    "backup_with_manifest": Template(3, archives.backup_with_manifest),
    "broken_links": Template(3, trees.broken_links),
    "sort_into_folders": Template(3, trees.sort_into_folders),
    "close_private_files": Template(3, trees.close_private_files),
    "folder_sizes": Template(3, trees.folder_sizes),
    "remove_duplicates": Template(3, trees.remove_duplicates),
    "restore_deleted": Template(3, version_control.restore_deleted),
    "commits_by_author": Template(3, version_control.commits_by_author),
    "merge_branch": Template(3, version_control.merge_branch),
    "revert_commit": Template(3, version_control.revert_commit),
    "ini_to_json": Template(3, config_files.ini_to_json),
    "merge_variables": Template(3, config_files.merge_variables),
    "disable_cron_jobs": Template(3, config_files.disable_cron_jobs),
    "stop_listed": Template(3, system.stop_listed),
    "which_run": Template(3, system.which_run),
    "busiest_address": Template(3, system.busiest_address),
    "slow_requests": Template(3, system.slow_requests),
    "last_logins": Template(3, system.last_logins),
}
# Never in training: whether a policy learnt more than the families it was shown. Some of every level and theme.
HELD_OUT = frozenset(
    (
        *("join_files", "reverse_lines", "decompress_file"),
        *(
            "longest_line",
            "missing_lines",
            "extract_one",
            "delete_empty",
            "commit_change",
            "set_variable",
            "time_window",
        ),
        *("mail_addresses", "average_by_item", "broken_links", "revert_commit", "merge_variables", "which_run"),
    )
)
# Of the laptop half the tasks ask for one operation, half for two.
LAPTOP: Mapping[str, Template] = {
    **{name: Template(1, home.single(home.OPERATIONS[name])) for name in home.LAPTOP},
    **{f"{name}_then": Template(2, home.sequence(home.OPERATIONS[name])) for name in home.LAPTOP},
}
