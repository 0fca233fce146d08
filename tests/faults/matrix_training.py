"""The rows of the fault matrix about a training run, R26 to R42: numbers, storage, load, clients."""

from tests.faults.matrix_row import Row, tests_in

_LAUNCH, _FORMING = "faults/test_launch_matrix.py", "faults/test_launch_forming.py"
_RUN, _RESUME = "faults/test_run_matrix.py", "faults/test_resume.py"
_DAMAGE, _DISK = "faults/test_checkpoint_damage.py", "faults/test_checkpoint_disk.py"
_HOSTILE, _LOCK = "faults/test_checkpoint_hostile.py", "unit/checkpoint/test_run_lock.py"
_STORED, _TRACKER = "faults/test_run_storage.py", "faults/test_run_sink.py"
_SINKS, _TRAINER = "unit/observe/test_sinks.py", "unit/train/test_trainer.py"

TRAINING = [
    # ---- numbers
    Row(
        "R26",
        "one bit of one parameter flips on one rank",
        "leaf, rank and step named by all within the interval; exit 1, a warning, or healed",
        (*tests_in(_RUN, "test_a_bit_that_flips_on_one_rank_is_named_by_all"), "device/test_sentinel.py"),
    ),
    Row(
        "R27",
        "a sample that overflows on one rank; a loss that is NaN",
        "all ranks leave that step out, or all stop and name it; a black box is written",
        (
            *tests_in(_RUN, "test_a_sample_that_overflows_and_a_spike_of_the_loss_are_left_out_by_all"),
            *tests_in(
                "unit/train/test_trainer.py",
                "test_nan_that_appears_while_training_ends_the_run_with_its_step",
            ),
        ),
    ),
    # ---- storage
    Row(
        "R28",
        "SIGKILL during saves, 30 times, and between any two renames",
        "nothing that was reported is lost; leftovers go at the next start",
        ("faults/test_checkpoint_kill.py",),
    ),
    Row(
        "R29",
        "every file of a step cut, emptied, lengthened, missing; bits flipped",
        "found each time; the step is set aside and the next older used, in one line",
        (_DAMAGE,),
    ),
    Row(
        "R30",
        "all checkpoints damaged",
        "listed; exit 1; no fresh start",
        tests_in(_DAMAGE, "test_without_a_good_step_it_is_an_error_that_lists_them_and_no_silent_start"),
    ),
    Row(
        "R31",
        "the disk fills up",
        "training goes on; how much is missing; the good step stays, no partial files; an error after three, "
        "and last of all where the final state is on no disk",
        tests_in(_STORED, "test_r31_training_on_a_disk_that_fills_up_goes_on_to_its_end")
        + tests_in(
            _DISK,
            "test_a_failed_save_is_a_warning_and_leaves_nothing",
            "test_several_failures_in_a_row_are_an_error_and_a_good_save_forgives_those_before",
        ),
    ),
    Row(
        "R32",
        "a folder that is a file, a link, not writable, or full of other things",
        "refused at the start with its path; exit 1; other people's files are ignored",
        (
            *tests_in(_STORED, "test_r32_a_run_folder_that_may_not_be_written_is_refused_with_its_path"),
            *tests_in("unit/config/test_run_folder.py", "test_a_file_and_a_circle_of_links_are_no_folders"),
            *tests_in(_HOSTILE, "test_links_are_refused_at_the_start_with_their_path"),
            *tests_in(
                _DISK,
                "test_a_place_that_is_no_folder_or_may_not_be_written_is_refused_at_the_start",
                "test_files_of_other_people_are_ignored",
            ),
        ),
    ),
    Row(
        "R33",
        "two jobs in one run folder; the first is killed",
        "the second is refused with the host and pid of the first; a dead one is taken over",
        (*tests_in(_RUN, "test_a_run_folder_has_one_job_and_a_dead_one_s_is_taken_over"), _LOCK),
    ),
    Row(
        "R34",
        "resumed with 1, 2 and 3 processes, with 2 and 3 devices",
        "the next unseen sample, each once an epoch; results equal to rounding",
        tests_in(
            _RESUME,
            "test_resumed_on_another_number_of_devices_again_and_again",
            "test_the_same_replicas_in_other_processes_give_the_same_numbers",
            "test_parameters_in_shares_go_on_in_other_numbers_of_processes_and_strategies",
        ),
    ),
    Row(
        "R34",
        "killed, suspended, resized by `batch_size` and `global_batch_size`, at random, again and again",
        "every sample once an epoch; in the same layout the bits of the unbroken run",
        ("faults/test_chaos.py",),
    ),
    Row(
        "R33",
        "under a running job: checkpoints deleted, checkpoints or ledger swapped for a link",
        "reported; nothing is written elsewhere; the run goes on, or ends with a line",
        ("unit/train/test_saves.py",),
    ),
    Row(
        "R35",
        "killed in the first step, in a save, in an evaluation, at random moments",
        "rerun: bit for bit the unbroken run",
        (
            *tests_in(_RESUME, "test_one_rank_after_another_is_killed_in_a_step_a_save_and_an_evaluation"),
            *tests_in("faults/test_chaos.py", "test_the_same_layout_gives_the_same_bits"),
        ),
    ),
    Row(
        "R36",
        "the data file is missing",
        "named before anything is written; exit 2",
        tests_in(_RUN, "test_data_that_is_not_there_is_named_before_anything_is_written"),
    ),
    Row(
        "R36",
        "a file of the data is gone, or cut short, when a rank comes to it",
        "its path and item are named; exit 1; the other rank is informed and ends",
        tests_in(
            _STORED,
            "test_r36_a_file_that_is_cut_short_is_named_and_the_other_rank_is_told",
            "test_r36_a_file_that_is_gone_is_the_launcher_s_first_error",
        ),
    ),
    # ---- load
    Row(
        "R37",
        "100 MB of output; a line without end",
        "all kept; the launcher's memory stays below 200 MB",
        tests_in(
            _LAUNCH,
            "test_r37_a_noisy_rank_stalls_nobody_and_memory_stays_flat",
        ),
    ),
    Row(
        "R38",
        "crash loop",
        "given up after three restarts without progress; exit 3",
        tests_in(_LAUNCH, "test_a_fault_that_comes_again_and_again_is_given_up"),
    ),
    Row(
        "R39",
        "six random kills of two ranks under the launcher",
        "as many restarts; its threads and files stay as many; bit for bit the unbroken run",
        tests_in(
            "faults/test_soak.py",
            "test_r39_kill_after_kill_leaves_the_supervisor_and_the_numbers_as_they_were",
        ),
    ),
    Row(
        "R40",
        "a metrics tracker that is slow, never answers, or fails",
        "no step waits; a slow one gets all records; else one warning names it and it is left behind",
        (_TRACKER, *tests_in(_SINKS, "test_a_broken_sink_is_told_once_and_left_out")),
    ),
    # ---- exact runs
    Row(
        "R34, R35",
        "`reproducibility: exact`: killed in two processes, in three, finished by one; hosts come and go",
        "every bit of parameters, optimizer, history and evaluation is the unbroken run's",
        ("faults/test_exact.py",),
    ),
    # ---- strangers
    Row(
        "R41",
        "hostile checkpoints (pickle, paths that leave the folder, sizes, links) and configurations",
        "refused with a message; nothing of theirs is run",
        (_HOSTILE, "faults/test_hostile_config.py", "house/test_security_lint.py"),
    ),
    Row(
        "R42",
        "a thousand unauthenticated clients of a running job",
        "refused; the job is untouched",
        tests_in(_FORMING, "test_strangers_at_the_port_of_a_running_job_are_refused_and_it_goes_on"),
    ),
]
