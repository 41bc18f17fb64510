"""Bytes that come from outside: who controls them, what bounds them, what a bad one does, and what proves it.

One row for each class. A new way in gets a row, and its tests are written with it. A test is named by its file below
`tests/` and its function; this file checks that all of them exist.
"""

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).parent


class Outside(NamedTuple):
    """A class of bytes. controls: who can write them. limit: what bounds their size and time. answer: to a bad one."""

    source: str
    controls: str
    limit: str
    answer: str
    tests: tuple[str, ...]


ONE_LINE = "one line that names the value and the fix, status 1"
TABLE = [
    Outside(
        "configuration, YAML, command line",
        "the user",
        "1 MiB of YAML, 8 levels; 5 s, 1 GiB of memory",
        ONE_LINE,
        ("test_fuzz.py::test_bad_command_lines", "config/test_config.py::test_mistakes_are_one_line_and_status_1"),
    ),
    Outside(
        "environment, values of launch scripts",
        "the user, the cluster",
        "numbers in their ranges",
        "one line before anything starts; all of a value counts, or none",
        (
            "launch/test_slurm.py::test_mistakes_are_one_line_and_a_failed_job",
            "launch/test_jube.py::test_a_job_that_fails_says_so_to_jube",
            "launch/test_slurm.py::test_a_key_that_a_job_would_read_otherwise_than_its_ranks_is_refused",
            "test_pretrain.py::test_a_place_in_no_world_is_one_line",
            "runtime/test_environment.py::test_a_round_that_no_supervisor_wrote_is_named",
            "runtime/test_environment.py::test_a_folder_that_another_user_could_have_made_is_not_used",
        ),
    ),
    Outside(
        "values of the chart",
        "whoever installs it",
        "the patterns of values.schema.json",
        "refused, or quoted: a value never becomes another key",
        (
            "launch/test_helm.py::test_a_value_stays_a_value",
            "launch/test_helm.py::test_mistakes_end_before_anything_is_installed",
        ),
    ),
    Outside(
        "index and tensors of a checkpoint",
        "whoever wrote the folder",
        "2 GiB of index; tensors are read as they are needed",
        "one line that names the file; no code runs; a save of another model is refused",
        (
            "checkpoint/test_checkpoint_format.py::test_a_hostile_checkpoint_runs_no_code",
            "checkpoint/test_checkpoint_format.py::test_every_corruption_is_found",
            "checkpoint/test_checkpoint.py::test_another_model",
            "tools/test_generate.py::test_a_checkpoint_without_a_part_of_its_index",
            "test_fuzz.py::test_hostile_files",
        ),
    ),
    Outside(
        "Hugging Face folders",
        "whoever published the model",
        "64 MiB of JSON; tensors are read as they are needed",
        "what the model cannot be is refused by name; nothing is left",
        (
            "checkpoint/test_convert_hf.py::test_a_key_of_another_network_is_refused_by_name",
            "checkpoint/test_convert_hf.py::test_a_rotary_parameter_of_another_network_is_refused_by_name",
            "checkpoint/test_convert_hf.py::test_what_the_model_cannot_be_is_refused_by_name",
            "checkpoint/test_convert_hf.py::test_a_dropout_that_is_no_rate_is_none",
            "checkpoint/test_convert_hf.py::test_a_damaged_folder_is_refused_and_nothing_is_left",
        ),
    ),
    Outside(
        "Megatron's torch_dist folders",
        "whoever published the model",
        "1 GiB of .metadata; tensors are read as they are needed",
        "no code of a pickle runs; an argument of another network, a damaged file, a hole or an overlap is named",
        (
            "tools/test_convert_megatron.py::test_a_pickle_that_would_run_code_is_refused_and_not_run",
            "tools/test_convert_megatron.py::test_an_argument_of_another_network_is_refused_and_cannot_be_accepted",
            "tools/test_convert_megatron.py::test_an_unknown_argument_that_is_on_is_refused_unless_accepted",
            "tools/test_convert_megatron.py::test_chunks_that_leave_a_hole_overlap_or_reach_beyond_are_refused",
            "tools/test_convert_megatron.py::test_names_that_are_no_text_and_shapes_that_are_none_are_refused",
            "tools/test_convert_megatron.py::test_damaged_files_are_named",
            "tools/test_convert_megatron.py::test_what_is_no_file_is_not_waited_for",
            "tools/test_convert_megatron.py::test_a_chunk_that_is_no_tensor_of_the_index_is_refused",
            "tools/test_limits.py::test_a_pickle_takes_no_more_than_its_bytes_allow",
        ),
    ),
    Outside(
        "adapters",
        "whoever published the adapter",
        "as a checkpoint's",
        "refused if its base or its shapes are others",
        (
            "checkpoint/test_adapter.py::test_an_adapter_belongs_to_its_base",
            "checkpoint/test_adapter.py::test_an_adapter_that_is_not_what_its_index_says_is_refused",
            "checkpoint/test_adapter.py::test_a_base_of_another_shape",
        ),
    ),
    Outside(
        "token files, .bin and .idx",
        "whoever made the data set",
        "mapped, not read; the index is checked against both sizes",
        "one line that names the file",
        (
            "data/test_data_indexed.py::test_wrong_files_are_one_clear_error",
            "data/test_data_indexed.py::test_damage_inside_of_an_index_is_named",
        ),
    ),
    Outside(
        "caches and their contents.json",
        "other runs, other users of the folder",
        "64 MiB of JSON; lengths and checksums of all files",
        "one line that names the folder to delete; only names inside of the folder are opened",
        (
            "data/test_cache.py::test_a_list_of_files_from_elsewhere_is_refused",
            "data/test_cache.py::test_any_changed_byte_of_the_list_is_found_or_harmless",
            "data/test_cache.py::test_a_remembered_text_that_somebody_has_deleted_is_named",
            "data/test_data_build.py::test_a_damaged_cache_names_the_folder_to_delete",
        ),
    ),
    Outside(
        "JSON lines, compressed files, Parquet, Arrow",
        "whoever made the data set",
        "128 MiB a document, decompressed a little at a time; 4 GiB of memory for a read of a table",
        "one line that names file and record; no data set is left",
        (
            "tools/test_limits.py::test_small_files_that_become_gigabytes_are_refused_within_two",
            "tools/test_limits.py::test_a_line_is_read_up_to_its_limit",
            "tools/test_limits.py::test_a_batch_is_bounded_also_if_its_lines_are_empty",
            "tools/test_limits.py::test_frames_follow_one_another_and_a_truncated_one_is_damaged",
            "tools/test_limits.py::test_a_read_of_a_table_is_bounded",
            "tools/test_limits.py::test_offsets_of_a_table_that_point_elsewhere_are_refused",
            "tools/test_preprocess.py::test_every_bad_input_is_named",
            "tools/test_rows.py::test_mistakes_with_tables_are_named",
        ),
    ),
    Outside(
        "state.json of saved data sets",
        "whoever made the data set",
        "64 MiB of JSON",
        "one line; only files beside it are opened",
        (
            "tools/test_limits.py::test_a_saved_dataset_names_only_files_beside_it",
            "tools/test_limits.py::test_a_name_that_no_file_can_have_or_that_is_listed_twice_is_refused",
            "tools/test_limits.py::test_a_state_that_is_none_is_named",
            "tools/test_rows.py::test_mistakes_with_tables_are_named",
        ),
    ),
    Outside(
        "files of tokenizers",
        "whoever published the model",
        "256 MiB; tried in a process with 60 s of CPU and 2 GiB of memory, once per content",
        "one line that names the tokenizer",
        (
            "data/test_tokenizers_hostile.py::test_every_hostile_file_loads_or_is_one_line",
            "data/test_tokenizers_hostile.py::test_the_line_says_how_the_trial_ended",
            "data/test_tokenizers_hostile.py::test_a_success_is_remembered_by_the_content",
            "data/test_tokenizers_hostile.py::test_time_is_bounded_also_if_the_parent_has_died",
            "data/test_tokenizers_hostile.py::test_a_panic_at_a_strange_text_is_one_line",
            "data/test_tokenizers.py::test_malformed_gpt2_files_are_an_error",
            "data/test_tokenizers.py::test_malformed_llama2_files_are_an_error",
            "data/test_tokenizers.py::test_malformed_llama3_files_are_an_error",
        ),
    ),
    Outside(
        "chat templates of tokenizers",
        "whoever published the model",
        "1 MiB; jinja2's sandbox in another process: 10 s of CPU and 32 M characters a chat, 1 GiB of memory",
        "one line that names the folder and the line of the data; after three ended processes every chat is refused",
        (
            "data/test_chat.py::test_a_template_that_does_harm_is_one_line",
            "data/test_chat.py::test_a_template_that_never_ends_stops_a_file_of_many_lines",
            "data/test_chat.py::test_special_tokens_of_a_chat_are_text_unless_they_are_asked_for",
        ),
    ),
    Outside(
        "questions and answers (SFT)",
        "whoever made the data set",
        "128 MiB a line, one at a time",
        "named by file and line",
        ("data/test_sft.py::test_a_bad_line_is_named_by_file_and_number",),
    ),
    Outside(
        "metrics.jsonl, round.json, beats",
        "other programs that write to the folder of the run",
        "64 MiB of JSON; one row at a time, 16 MiB of it",
        "skipped and counted; the run goes on",
        (
            "supervise/test_supervisor.py::test_garbage_in_all_files_does_not_end_a_run",
            "supervise/test_supervisor.py::test_garbage_in_beats_is_skipped_and_counted",
            "supervise/test_supervisor.py::test_garbage_in_the_round_is_skipped_and_counted",
            "supervise/test_supervisor.py::test_the_last_step_is_looked_for_in_a_regular_file_alone",
            "supervise/test_goodput.py::test_rows_of_others_are_skipped_and_counted",
            "supervise/test_goodput.py::test_a_line_without_end_is_not_read",
        ),
    ),
    Outside(
        "logs that tools draw",
        "other programs that write to the folder of the run",
        "regular files; numbers that can be drawn",
        ONE_LINE,
        (
            "tools/test_plot_run.py::test_bad_input_is_one_line",
            "tools/test_stragglers_tool.py::test_what_cannot_be_drawn_is_one_line",
            "tools/test_training_metrics.py::test_mistakes_are_one_line",
        ),
    ),
    Outside(
        "the store, agreements of the ranks",
        "whoever reaches MASTER_PORT",
        "the time limit of the start",
        "what no rank has signed is named and ignored; a deleted key is put back; nothing is unpickled",
        (
            "runtime/test_faults.py::test_a_stranger_at_the_store_of_a_run_does_not_stop_it",
            "runtime/test_faults.py::test_a_gate_whose_key_somebody_deletes_is_closed_all_the_same",
            "runtime/test_rendezvous.py::test_a_stranger_s_replies_and_arrivals_are_ignored",
            "comm/test_agree.py::test_all_ranks_get_the_answer_of_rank_0",
        ),
    ),
    Outside(
        "the port of Prometheus",
        "whoever reaches it",
        "one connection at a time, a time limit for each",
        "the run does not notice",
        (
            "runtime/test_sinks.py::test_idle_and_slow_clients_of_prometheus_cost_one_descriptor",
            "runtime/test_sinks.py::test_prometheus_binds_the_address_that_is_named",
        ),
    ),
    Outside(
        "names that are printed to a terminal",
        "whoever made the files",
        "none",
        "what moves the cursor is shown as its escape; an error stays one line",
        (
            "tools/test_limits.py::test_printable_keeps_what_can_be_printed",
            "tools/test_limits.py::test_what_a_tool_prints_and_its_error_move_no_cursor",
            "tools/test_limits.py::test_an_error_that_quotes_a_file_is_as_short_as_a_line",
            "tools/test_limits.py::test_a_run_s_name_is_no_escape_and_no_formula",
            "supervise/test_supervisor.py::test_a_reason_is_one_line",
            "supervise/test_supervisor.py::test_what_a_rank_says_moves_no_cursor",
        ),
    ),
    Outside(
        "signals, killed processes",
        "the cluster, the user",
        "the hang limit",
        "saved and status 0, or one line and a status that is not 0",
        (
            "runtime/test_faults.py::test_sigterm_to_torchrun_stops_all_ranks",
            "runtime/test_faults.py::test_a_rank_killed_at_any_moment_ends_the_others_with_one_line",
            "checkpoint/test_kill.py::test_a_run_survives_many_kills",
            "test_failing_disk.py::test_a_run_that_is_killed_in_a_claim_stops_nobody_with_an_empty_name",
        ),
    ),
    Outside(
        "disks that are full or fail",
        "the cluster",
        "none",
        "a save or a record is lost, one line says so, the run goes on",
        (
            "test_failing_disk.py::test_a_save_that_fails_at_any_operation_costs_itself_alone",
            "runtime/test_log.py::test_a_log_that_fails_at_any_operation_costs_records",
            "checkpoint/test_checkpoint.py::test_a_failing_disk_costs_the_checkpoint_and_not_the_run",
        ),
    ),
    Outside(
        "command line of the supervisor",
        "the user, launch scripts",
        "numbers in their ranges",
        ONE_LINE,
        ("supervise/test_supervisor.py::test_a_value_with_which_no_run_starts_is_one_line",),
    ),
    Outside(
        "saves on the nodes' own disks",
        "other runs on the node",
        "as a checkpoint's",
        "named and not used",
        (
            "checkpoint/test_local.py::test_a_damaged_local_save_is_named_and_skipped",
            "checkpoint/test_local.py::test_local_saves_of_another_run_do_not_count",
        ),
    ),
]


@cache
def functions_of(file: str) -> set[str]:
    """The names of a file's test functions, which is not imported: what it needs may not be installed."""
    tree = ast.parse((HERE / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.source)
def test_each_class_of_bytes_has_a_test_that_exists(row):
    assert all(row) and row.tests
    for name in row.tests:
        file, _, function = name.partition("::")
        assert (HERE / file).is_file() and function in functions_of(file), f"no test is named {name}"


def test_no_class_is_listed_twice():
    assert len({row.source for row in TABLE}) == len(TABLE)
