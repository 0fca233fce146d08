"""The rows of the fault matrix about starting, watching and ending processes: R1 to R25, elastic hosts."""

from tests.faults.matrix_row import Row, tests_in

_LAUNCH, _FORMING = "faults/test_launch_matrix.py", "faults/test_launch_forming.py"
_MEETING, _POLICY = "unit/launch/test_rendezvous.py", "unit/launch/test_controller.py"
_ELASTIC, _RESUME, _STOP = (f"faults/test_{name}.py" for name in ("launch_elastic", "resume", "polite_stop"))
_AGAIN = "test_ranks_that_were_killed_or_hang_are_started_again"
_FAILS = "test_one_rank_fails_and_the_group_ends_with_its_error"
_STOPPED = "test_a_signal_to_the_launcher_stops_the_ranks"
_STRANGERS = "test_strangers_at_the_port_of_a_running_job_are_refused_and_it_goes_on"
_KILLED = "test_one_rank_after_another_is_killed_in_a_step_a_save_and_an_evaluation"
_REQUEST = "test_signals_within_two_seconds_to_any_process_are_one_request"

PROCESSES = [
    # ---- ranks die
    Row(
        "R1",
        "SIGKILL of rank 1",
        "the group starts again and finishes",
        tests_in(_LAUNCH, _AGAIN),
    ),
    Row(
        "R1",
        "SIGKILL of rank 1, no restarts allowed",
        "all end; the signal is named; exit 3",
        tests_in(_LAUNCH, f"{_FAILS}[R1 without restarts]"),
    ),
    Row("R2", "SIGKILL of rank 0", "as R1", tests_in(_LAUNCH, _AGAIN)),
    Row("R3", "SIGKILL of two ranks of three at once", "as R1", tests_in(_LAUNCH, _AGAIN)),
    Row(
        "R1, R2",
        "the same in a training of two ranks that save together",
        "rerun: parameters bit for bit those of an unbroken run",
        tests_in(_RESUME, "test_killed_between_the_shares_of_a_save_or_told_to_stop_nothing_is_lost"),
    ),
    Row(
        "R1, R2, R3",
        "each of three ranks of a training: in a step, an evaluation, a save",
        "the others end; rerun: bit for bit the unbroken run of three",
        tests_in(_RESUME, f"{_KILLED}[three ranks]"),
    ),
    Row(
        "R4",
        "exception on one rank; in a thread; `sys.exit(3)`; with a child process",
        "all end; its traceback last and alone; exit 1, or 3 as asked; the child ends too",
        tests_in(
            _LAUNCH,
            f"{_FAILS}[R4 in a thread]",
            f"{_FAILS}[R4 sys.exit]",
            f"{_FAILS}[R4 with children]",
            "test_r4_the_first_error_is_last_and_alone_and_secrets_are_not_shown",
        ),
    ),
    Row(
        "R5",
        "the same exception on all ranks",
        "shown once a start, tried twice, exit 1",
        tests_in(_LAUNCH, "test_a_fault_that_comes_again_and_again_is_given_up"),
    ),
    Row(
        "R6",
        "a rank ends early (exit 0, `os._exit`)",
        "that rank is named; exit 1",
        tests_in(_LAUNCH, f"{_FAILS}[R6 exit 0]", f"{_FAILS}[R6 vanished]"),
    ),
    # ---- ranks hang
    Row(
        "R7",
        "SIGSTOP of a rank",
        "named as suspended, killed; exit 124, or started again (limit set to 3 s)",
        tests_in(_LAUNCH, f"{_FAILS}[R7 suspended]", _AGAIN),
    ),
    Row(
        "R8",
        "a loader that sleeps while the others wait in a real collective",
        "its rank, file and line; exit 124 (limit set to 3 s)",
        tests_in(_LAUNCH, f"{_FAILS}[R8 data]"),
    ),
    Row(
        "R9",
        "GIL held; endless loop",
        "as R8",
        tests_in(_LAUNCH, f"{_FAILS}[R9 GIL held]", f"{_FAILS}[R9 endless loop]"),
    ),
    Row(
        "R10",
        "a slow rank",
        "one line names it; nobody is killed",
        tests_in(_LAUNCH, "test_r10_a_slow_rank_is_named_and_left_alone"),
    ),
    # ---- signals
    Row(
        "R11",
        "SIGTERM to the launcher",
        "the ranks save and stop; exit 143",
        (
            *tests_in(_LAUNCH, f"{_STOPPED}[R11]", f"{_STOPPED}[R11 under jax]"),
            *tests_in(_STOP, f"{_REQUEST}[TERM to the launcher]"),
        ),
    ),
    Row(
        "R11",
        "SIGTERM to the launcher, and the last save fails",
        "the error is shown; exit 1, not 143",
        tests_in(_LAUNCH, f"{_STOPPED}[R11 no room]"),
    ),
    Row(
        "R11",
        "SIGTERM or SIGINT to one rank, or to launcher and ranks up to five times within 1 s",
        "one request: one save; exit 143, 130",
        (
            *tests_in(_STOP, _REQUEST),
            *tests_in(
                _LAUNCH,
                "test_r11_a_rank_that_a_signal_asks_to_stop_has_not_failed",
            ),
        ),
    ),
    Row(
        "R11",
        "SIGTERM to one rank in a step, compiling, evaluating or saving; `--max-time`",
        "all ranks stop after one step, which verifies; the next run goes on from it",
        tests_in(
            _STOP,
            "test_one_rank_is_told_and_all_stop_after_the_same_step",
            "test_told_while_compiling_evaluating_or_saving",
            "test_out_of_time_on_one_clock_is_out_of_time_for_all",
        ),
    ),
    Row(
        "R12",
        "SIGTERM ignored; a second SIGTERM",
        "killed at the end of the grace; at once. The last good step stays",
        (
            *tests_in(_LAUNCH, f"{_STOPPED}[R12]"),
            *tests_in(_LAUNCH, "test_r12_a_second_sigterm_ends_the_patience"),
            *tests_in(_STOP, "test_a_second_signal_does_not_wait_for_the_save"),
        ),
    ),
    Row("R13", "Ctrl-C", "exit 130, nothing is left", tests_in(_LAUNCH, f"{_STOPPED}[R13]")),
    Row(
        "R14",
        "SIGKILL of the launcher",
        "ranks and their children end with it",
        tests_in(
            "faults/test_launch_upkeep.py",
            "test_a_killed_launcher_leaves_no_process_and_its_folder_to_the_next_one",
        ),
    ),
    Row(
        "R15",
        "SIGSEGV, abort, a real-time signal",
        "the signal is named, with the last words on stderr; exit 3",
        tests_in(
            _LAUNCH,
            f"{_FAILS}[R15 segmentation fault]",
            f"{_FAILS}[R15 abort]",
            f"{_FAILS}[real-time signal]",
        ),
    ),
    Row(
        "R16",
        "out of memory (address limit)",
        "`MemoryError` of that rank; exit 1",
        tests_in(_LAUNCH, f"{_FAILS}[R16 memory]"),
    ),
    # ---- a group forms
    Row(
        "R17",
        "a rank never starts; rank 0 never does",
        "the missing rank is named; connection refused to HOST:PORT",
        (
            *tests_in(_FORMING, "test_r17_a_rank_that_never_starts_is_named"),
            *tests_in(_MEETING, "test_a_wrong_address_says_in_which_way"),
        ),
    ),
    Row(
        "R18",
        "rank 0 comes late",
        "waited for",
        tests_in(_MEETING, "test_a_rank_that_comes_before_rank_0_waits_for_it"),
    ),
    Row(
        "R19",
        "another WORLD_SIZE on one rank",
        "refused on both sides, with both values",
        tests_in(_MEETING, "test_a_rank_of_another_world_size_that_comes_first_is_remembered"),
    ),
    Row(
        "R20",
        "a second rank 1 in a running job, with and without the token",
        "refused; the job is untouched",
        tests_in(_FORMING, _STRANGERS),
    ),
    Row(
        "R21",
        "RANK out of range, a bad port, half an environment",
        "an error that names the variable, before jax is loaded",
        (
            *tests_in("unit/launch/test_topology.py", "test_bad_environments_name_the_variable_and_hint"),
            *tests_in("house/test_layering.py", "test_no_jax_is_loaded_by_what_starts_at_once"),
        ),
    ),
    Row(
        "R22",
        "the port in use: by another program, a sharing one on IPv6, another job",
        "refused every time: the port and the other job are named",
        (
            *tests_in(_MEETING, "test_a_port_held_by_a_sharing_program_is_refused"),
            *tests_in(_FORMING, _STRANGERS),
        ),
    ),
    Row(
        "R23",
        "a wrong or unknown MASTER_ADDR",
        "said which: not resolved, refused, not this host's",
        tests_in(
            _MEETING,
            "test_a_wrong_address_says_in_which_way",
            "test_an_address_of_another_host_on_rank_0",
        ),
    ),
    Row(
        "R24",
        "a rank dies while the group forms",
        "it may come again, and the group forms",
        tests_in(_MEETING, "test_a_rank_that_dies_while_the_group_forms_may_come_again"),
    ),
    Row(
        "R25",
        "ranks of different configuration; calls, shapes or dtypes that differ",
        "refused on every rank, with both values, before a step",
        (
            *tests_in(_MEETING, "test_all_are_told_why_no_group_forms_before_rank_0_ends"),
            *tests_in(
                "faults/test_other_host.py",
                "test_other_code_or_another_program_is_refused_on_both_ranks",
                "test_what_no_version_tells_is_refused_on_both_ranks_before_a_step",
            ),
            *tests_in(
                "multiprocess/test_collectives.py", "test_what_differs_or_is_missing_is_named_on_every_rank"
            ),
        ),
    ),
]

HOSTS = [
    Row(
        "hosts",
        "one joins, is lost, is asked to stop",
        "one restart at the new size each, in real collectives",
        tests_in(_ELASTIC, "test_hosts_come_and_go_at_the_cost_of_one_restart_each"),
    ),
    Row(
        "hosts",
        "fewer than MIN",
        "waits, says who is here; exit 3",
        tests_in(
            _POLICY,
            "test_missing_hosts_are_waited_for_as_long_as_the_timeout_says",
            "test_below_the_fewest_an_elastic_job_waits_for_another_host_and_then_ends",
        ),
    ),
    Row(
        "hosts",
        "the first host is asked to stop",
        "the job ends everywhere; exit 143",
        tests_in(_ELASTIC, "test_the_first_host_takes_the_job_with_it"),
    ),
    Row(
        "hosts",
        "one of a fixed number gives up",
        "the others end at once; exit 75 where ranks only followed",
        tests_in(_ELASTIC, "test_where_one_host_gives_up_the_other_ends_at_once"),
    ),
    Row(
        "hosts",
        "one of a fixed number is lost, or asked to stop",
        "ends at once, or waits for it within --max-restarts",
        (
            *tests_in(_POLICY, "test_a_fixed_job_pays_for_a_lost_host_with_a_restart"),
            *tests_in(
                _ELASTIC,
                "test_the_loss_of_the_first_host_ends_a_job_without_restarts",
                "test_with_restarts_a_lost_host_is_waited_for_and_takes_its_ranks_again",
                "test_a_host_that_is_asked_to_stop_ends_the_job",
            ),
        ),
    ),
]
