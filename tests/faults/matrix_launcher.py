"""The rows of the fault matrix about the launcher: its protocol, suspensions, readers, helpers, signals."""

from tests.faults.matrix_row import Row, tests_in

_HANDSHAKE, _PAUSED = "unit/launch/test_handshake.py", "faults/test_launch_suspended.py"
_UPKEEP = "faults/test_launch_upkeep.py"

LAUNCHER = [
    Row(
        "protocol",
        "half a surrogate pair, 10,000 other broken inputs to either server; hellos that claim anything",
        "each ends its own connection; the group forms, a host is let in",
        tests_in(
            _HANDSHAKE,
            "test_after_thousands_of_broken_connections_the_server_works",
            "test_whatever_a_signed_hello_claims_it_is_let_in_or_refused",
        ),
    ),
    Row(
        "protocol",
        "clients on all places, a byte at a time; a thousand wrong tokens; escape codes in a name",
        "one deadline for the hello; the job gets in; two lines; escaped",
        tests_in(
            _HANDSHAKE,
            "test_a_hello_in_drips_has_one_deadline",
            "test_300_clients_that_come_back_do_not_keep_a_slow_host_out",
            "test_many_wrong_tokens_are_two_lines",
            "test_the_name_of_a_host_cannot_steer_a_terminal",
        ),
    ),
    Row(
        "pause",
        "the job, its launcher or a rank suspended for 36 s; Ctrl-Z",
        "goes on; the ranks stop with Ctrl-Z and go on too",
        tests_in(
            _PAUSED,
            "test_what_was_suspended_goes_on",
            "test_ctrl_z_suspends_the_ranks_too_and_they_go_on",
        ),
    ),
    Row(
        "pause",
        "nobody reads the output of a rank that prints 100 MB",
        "the ranks go on, SIGTERM saves; lines left out are counted",
        tests_in(_PAUSED, "test_a_reader_that_stands_still_stops_neither_the_ranks_nor_sigterm"),
    ),
    Row(
        "launcher",
        "SIGUSR1 all through start-up, compile, steps and the final evaluation",
        "saves when it can, and goes on",
        tests_in(
            _UPKEEP,
            "test_what_asks_for_no_end_ends_nobody_and_nothing_is_said",
            "test_sigusr1_all_through_a_training_saves_when_it_can_and_goes_on",
        ),
    ),
    Row(
        "launcher",
        "Ctrl-C while launcher or ranks load their libraries; PYTHONWARNINGS=error",
        "one line, exit 130; nothing is printed",
        tests_in(
            _UPKEEP,
            "test_ctrl_c_in_the_first_seconds_is_one_line",
            "test_what_asks_for_no_end_ends_nobody_and_nothing_is_said",
        ),
    ),
    Row(
        "launcher",
        "SIGHUP under nohup; of a terminal that closes",
        "ignored as it was; the ranks save and stop, exit 143",
        (
            *tests_in(_UPKEEP, "test_what_asks_for_no_end_ends_nobody_and_nothing_is_said"),
            *tests_in(
                "faults/test_launch_matrix.py", "test_a_signal_to_the_launcher_stops_the_ranks[hangup]"
            ),
        ),
    ),
    Row(
        "launcher",
        "SIGCHLD ignored by the process that starts it",
        "a rank that ends is noticed, with its signal",
        tests_in(_UPKEEP, "test_the_ends_of_ranks_are_seen_where_sigchld_was_ignored"),
    ),
    Row(
        "launcher",
        "its folder tidied away; leftovers of a killed one, records of failed ones",
        "made anew, in one line; removed at the next start, of the records all but five",
        tests_in(
            _UPKEEP,
            "test_of_error_records_without_a_better_place_the_newest_stay",
            "test_a_folder_that_is_tidied_away_is_made_anew_and_an_error_still_shown",
            "test_a_killed_launcher_leaves_no_process_and_its_folder_to_the_next_one",
        ),
    ),
]
